/* The loops over float32 and float64: updates.inc, once for each. */
#include "kernels.h"
#include "stream.h"

#ifndef SHOAL_BLOCK_BYTES
#define SHOAL_BLOCK_BYTES 1024 /* of each array at a time: all open sums of a block stay in the first cache */
#endif

enum { NO_STEP, A_STEP, DECAYED_STEP }; /* whether a part is a gradient, by which a step is still to be taken */

#define REAL float
#define NAME(f) f##_f32
#include "updates.inc"
#undef REAL
#undef NAME

#define REAL double
#define NAME(f) f##_f64
#include "updates.inc"
