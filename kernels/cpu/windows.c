/* Windows of images as rows of a matrix (im2col, col2im), the largest of each, and the weights that take gradients back. */
#include "kernels.h"

#include <string.h>

#define REAL float
#define NAME(f) f##_f32
#include "windows.inc"
#undef REAL
#undef NAME

#define REAL double
#define NAME(f) f##_f64
#include "windows.inc"
