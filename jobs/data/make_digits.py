"""Make src/shoal/data/digits.h5 from scikit-learn's copy of the UCI digits (needs scikit-learn).

    python jobs/data/make_digits.py src/shoal/data/digits.h5

The samples are shuffled and split, class by class, into 1,437 for training and 360 for test, because
the original order separates the writers: splitting it in the middle tests on strangers.
"""

from __future__ import annotations

import sys

import h5py
import numpy as np
from sklearn.datasets import load_digits

from shoal.data.holdout import stratified
from shoal.data.keyed import permutation

SEED = 0
TEST_SAMPLES = 360
ATTRIBUTES = {
    "title": "Optical Recognition of Handwritten Digits (the 1,797 samples of the original test set)",
    "attribution": "E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi 10.24432/C50P49",
    "licence": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "changes": (
        "Taken from scikit-learn's copy; pixels 0 ... 16 stored as uint8 (N, 8, 8, 1); shuffled and split "
        "by class into 1,437 training and 360 test samples; index_* is each sample's place in the original."
    ),
}


def main(path: str) -> None:
    """Write the file; the same versions write the same bytes."""
    digits = load_digits()
    x = digits.images.astype(np.uint8)[..., None]
    y = digits.target.astype(np.uint8)
    test = stratified(y.astype(np.int64), TEST_SAMPLES, SEED, "digits-split")
    with h5py.File(path, "w") as file:
        file.attrs.update(ATTRIBUTES)
        for a, (part, chosen) in enumerate((("train", ~test), ("test", test))):
            index = np.flatnonzero(chosen)
            index = index[permutation(SEED, "digits-shuffle", a, len(index))].astype(np.uint16)
            for name, values in (("x", x[index]), ("y", y[index]), ("index", index)):
                file.create_dataset(f"{name}_{part}", data=values, compression="gzip", compression_opts=9)


if __name__ == "__main__":
    main(sys.argv[1])
