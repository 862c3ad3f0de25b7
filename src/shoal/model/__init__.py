"""Networks on flat buffers: layers, nets, losses and gradients."""

from shoal.model.convolution import Conv2d
from shoal.model.dropout import Dropout
from shoal.model.flat import FlatBuffer, Layout, Tensor
from shoal.model.gradient import Model, check_fit
from shoal.model.layer import Layer
from shoal.model.layers import Flatten, Linear, ReLU, Sequential, Sigmoid
from shoal.model.nets import build
from shoal.model.normalisation import BatchNorm
from shoal.model.pooling import AveragePool, GlobalPool, MaxPool
from shoal.model.residual import Residual, SqueezeExcitation
from shoal.model.resnets import resnet18, resnet20, senet18

__all__ = [
    "AveragePool",
    "BatchNorm",
    "Conv2d",
    "Dropout",
    "FlatBuffer",
    "Flatten",
    "GlobalPool",
    "Layer",
    "Layout",
    "Linear",
    "MaxPool",
    "Model",
    "ReLU",
    "Residual",
    "Sequential",
    "Sigmoid",
    "SqueezeExcitation",
    "Tensor",
    "build",
    "check_fit",
    "resnet18",
    "resnet20",
    "senet18",
]
