"""The hot loops: fused updates over flat arrays.

Each is written here as a NumPy twin, which says what it computes and is the oracle for a faster form. All work
in place, allocate nothing, and take sizes as arguments. `xp` is the array module that holds the arrays.
"""

from shoal.kernels.updates import displacement_update, momentum_step, per_rate_update, sgd_step

__all__ = ["displacement_update", "momentum_step", "per_rate_update", "sgd_step"]
