/* Passes over the rows of features that batch norm and squeeze-excitation are made of. */
#include "kernels.h"

#include <string.h>

#define SUM_ROWS 128 /* as in layer_twins.py */

typedef int32_t bits_f32 __attribute__((vector_size(16)));
typedef int64_t bits_f64 __attribute__((vector_size(32)));

#define REAL float
#define NAME(f) f##_f32
#include "features.inc"
#undef REAL
#undef NAME

#define REAL double
#define NAME(f) f##_f64
#include "features.inc"
