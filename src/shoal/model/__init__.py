"""Networks on flat buffers: layers, nets, losses and gradients."""
