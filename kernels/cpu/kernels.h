/* The hot loops of shoal in portable C11: what each file offers to the Python binding.

   Every product is rounded before it is added (-ffp-contract=off, no fast-math), so that each loop has the bits of
   its NumPy twin. Arrays given to one call are the same memory or do not overlap. Nothing allocates. */
#ifndef SHOAL_KERNELS_H
#define SHOAL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define SHOAL_DEPTH 64 /* sums that may be open at a time */
#define SHOAL_LINE 8   /* 64-bit words of a rank's line on the board of a barrier */

/* Iterations are independent, although the output may be one of the inputs. */
#if defined(__clang__)
#define EACH(i, n) _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < (n); i++)
#elif defined(__GNUC__)
#define EACH(i, n) _Pragma("GCC ivdep") for (size_t i = 0; i < (n); i++)
#else
#define EACH(i, n) for (size_t i = 0; i < (n); i++)
#endif

#define INLINE static inline __attribute__((always_inline))

/* Parts to be added, as a stack machine: push part i, then joins[i] times replace the top two by left + right. */
typedef struct {
    size_t count, size; /* parts; elements of each */
    const void *const *parts;
    const unsigned char *joins;
} shoal_terms;

typedef enum { SHOAL_SUM, SHOAL_STATISTICS, SHOAL_DISPLACEMENT, SHOAL_PER_RATE } shoal_rule;

/* What becomes of d = scale * sum. Pointers that the rule has no use for are NULL. With `gradients`, a part is not what
   is to be added but the gradient of a step from `a` that displaces by it. */
typedef struct {
    shoal_rule rule;
    int gradients;
    double scale, mu, rate, decay;
    const void *a, *v;
    void *a_out, *v_out; /* the sum itself goes to a_out */
} shoal_move;

/* From (w, m) by the gradient g to (w_out, m_out), or with an `a` to w_out = what is reached - a. */
typedef struct {
    double rate, beta, decay;
    int nesterov, decays;
    size_t decayed; /* so many elements from the first on have weight decay */
    const void *w, *m, *g, *a; /* m and m_out, a: or NULL */
    void *w_out, *m_out;
} shoal_step;

void shoal_delta_f32(const void *w, const void *a, void *out, size_t n);
void shoal_delta_f64(const void *w, const void *a, void *out, size_t n);
void shoal_local_step_f32(const shoal_step *by, size_t n);
void shoal_local_step_f64(const shoal_step *by, size_t n);
void shoal_reduce_f32(const shoal_terms *terms, const shoal_move *move);
void shoal_reduce_f64(const shoal_terms *terms, const shoal_move *move);

void shoal_pack_f16(const float *x, uint16_t *out, size_t n);
void shoal_unpack_f16(const uint16_t *x, float *out, size_t n);
void shoal_pack_bf16(const float *x, uint16_t *out, size_t n);
void shoal_unpack_bf16(const uint16_t *x, float *out, size_t n);

/* Square windows of images (n, height, width, channels), and the output pixels that a call is about: whole lines of
   some images. */
typedef struct {
    size_t height, width, channels, kernel, stride, padding;
} shoal_windows;

typedef struct {
    size_t image, images, line, lines;
} shoal_block;

static inline size_t shoal_along(const shoal_windows *by, size_t side) {
    return (side + 2 * by->padding - by->kernel) / by->stride + 1;
}

void shoal_unfold_f32(const void *x, void *rows, const shoal_windows *by, const shoal_block *block);
void shoal_unfold_f64(const void *x, void *rows, const shoal_windows *by, const shoal_block *block);
void shoal_fold_f32(const void *rows, void *x, const shoal_windows *by, const shoal_block *block);
void shoal_fold_f64(const void *rows, void *x, const shoal_windows *by, const shoal_block *block);
void shoal_mirror_f32(const void *w, void *out, size_t kernel, size_t inputs, size_t outputs);
void shoal_mirror_f64(const void *w, void *out, size_t kernel, size_t inputs, size_t outputs);

/* `winner` may be NULL in the first; `pixels` of all outputs. */
void shoal_max_pool_f32(const void *x, void *y, int16_t *winner, size_t pixels, const shoal_windows *by);
void shoal_max_pool_f64(const void *x, void *y, int16_t *winner, size_t pixels, const shoal_windows *by);
void shoal_max_pool_gradient_f32(const void *dy, const int16_t *winner, void *dx, size_t pixels,
                                 const shoal_windows *by);
void shoal_max_pool_gradient_f64(const void *dy, const int16_t *winner, void *dx, size_t pixels,
                                 const shoal_windows *by);

/* An array (groups, rows, features). Arguments that may be NULL: y, dz, shift, beside. */
typedef struct {
    size_t groups, rows, features;
} shoal_rows;

void shoal_moments_f32(const void *x, double *sums, const shoal_rows *of);
void shoal_moments_f64(const void *x, double *sums, const shoal_rows *of);
void shoal_masked_f32(const void *dy, const void *y, void *dz, size_t n);
void shoal_masked_f64(const void *dy, const void *y, void *dz, size_t n);
void shoal_affine_f32(const void *x, const void *scale, const void *shift, const void *beside, void *out,
                      const shoal_rows *of, int relu);
void shoal_affine_f64(const void *x, const void *scale, const void *shift, const void *beside, void *out,
                      const shoal_rows *of, int relu);
void shoal_gradient_moments_f32(const void *dy, const void *x, const void *y, void *dz, double *sums,
                                const shoal_rows *of);
void shoal_gradient_moments_f64(const void *dy, const void *x, const void *y, void *dz, double *sums,
                                const shoal_rows *of);
void shoal_affine_gradient_f32(const void *dy, const void *x, const void *y, const void *factors, void *dx,
                               const shoal_rows *of);
void shoal_affine_gradient_f64(const void *dy, const void *x, const void *y, const void *factors, void *dx,
                               const shoal_rows *of);

/* Samples by index; moves, or NULL: (top, left, mirrored) of each. The output pixel (r, j) is the source pixel
   (r + top, j' + left), where j' is j, or width - 1 - j if mirrored. */
typedef struct {
    size_t count;
    const int64_t *indices, *moves;
} shoal_chosen;

typedef struct {
    size_t rows, width, channels;
    const float *shift, *scale; /* of one row */
} shoal_image;

void shoal_gather_u8(const void *samples, const shoal_chosen *chosen, const shoal_image *image, float *out);
void shoal_gather_f32(const void *samples, const shoal_chosen *chosen, const shoal_image *image, float *out);
void shoal_gather_f64(const void *samples, const shoal_chosen *chosen, const shoal_image *image, float *out);

/* The board has SHOAL_LINE words a rank. `wait` returns the first member that is missing after `patience_s`, or -1.
   `arrive` is `post` and then `wake`; a rank that spins may do other things before it wakes those who sleep, so
   `posted`, the line of a rank that has still to, is woken for where a wait gives the core away. */
typedef struct {
    long spins, yields;
    double patience_s;
    int64_t *posted; /* or NULL; `wait` sets it to NULL */
} shoal_patience;

void shoal_post(int64_t *line, int64_t sequence);
void shoal_wake(int64_t *line);
void shoal_arrive(int64_t *board, int64_t me, int64_t sequence);
int64_t shoal_missing(int64_t *board, const int64_t *members, size_t count, int64_t sequence);
int shoal_claim(int64_t *hub, int64_t sequence, int64_t me);
int64_t shoal_claimer(int64_t *hub, int64_t sequence);
int64_t shoal_wait(int64_t *board, const int64_t *members, size_t count, int64_t sequence, shoal_patience *patience);

#endif
