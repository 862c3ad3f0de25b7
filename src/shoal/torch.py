"""PyTorch modules and datasets in `shoal.train`:

shoal.train(model=shoal.torch.Model(module, loss), data=(train_dataset, test_dataset), ...)
"""

from shoal.data.mapstyle import MapData
from shoal.errors import InputError

try:
    from shoal.model.torch import Model
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise InputError("shoal.torch needs PyTorch, which is not installed: pip install 'shoal[torch]'") from error

__all__ = ["MapData", "Model"]
