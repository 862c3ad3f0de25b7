/* A batch from samples in one pass: each is picked, moved, mirrored, turned into float32, shifted and scaled.

   A sample is an image of `rows` x `width` pixels of `channels` numbers; what is moved in from beyond its edge is 0.
   shift and scale are those of one row, width * channels numbers. */
#include "kernels.h"

static int64_t clamped(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

INLINE void blank(const shoal_image *image, int64_t first, int64_t last, float *out) {
    size_t begin = (size_t)first * image->channels, end = (size_t)last * image->channels;
    for (size_t i = begin; i < end; i++) out[i] = (0.0f - image->shift[i]) * image->scale[i];
}

#define GATHER(TYPE, NAME) \
    INLINE void row_##NAME(const TYPE *from, int64_t left, int flip, const shoal_image *image, float *out) { \
        int64_t width = (int64_t)image->width, offset = flip ? left : -left; \
        int64_t first = clamped(offset, width), last = clamped(width + offset, width); \
        size_t channels = image->channels; \
        blank(image, 0, first, out); \
        blank(image, last, width, out); \
        if (!flip) { \
            size_t begin = (size_t)first * channels, end = (size_t)last * channels; \
            const TYPE *x = from + left * (int64_t)channels; \
            for (size_t i = begin; i < end; i++) out[i] = ((float)x[i] - image->shift[i]) * image->scale[i]; \
            return; \
        } \
        for (int64_t j = first; j < last; j++) { \
            const TYPE *x = from + (width - 1 - j + left) * (int64_t)channels; \
            size_t at = (size_t)j * channels; \
            for (size_t c = 0; c < channels; c++) \
                out[at + c] = ((float)x[c] - image->shift[at + c]) * image->scale[at + c]; \
        } \
    } \
    void shoal_gather_##NAME(const void *samples, const shoal_chosen *chosen, const shoal_image *image, float *out) { \
        static const int64_t still[3]; \
        int64_t rows = (int64_t)image->rows; \
        size_t length = image->width * image->channels; \
        for (size_t n = 0; n < chosen->count; n++) { \
            const TYPE *from = (const TYPE *)samples + (size_t)chosen->indices[n] * image->rows * length; \
            const int64_t *move = chosen->moves ? chosen->moves + 3 * n : still; \
            for (int64_t r = 0; r < rows; r++, out += length) { \
                int64_t source = r + move[0]; \
                if (source < 0 || source >= rows) blank(image, 0, (int64_t)image->width, out); \
                else row_##NAME(from + (size_t)source * length, move[1], move[2] != 0, image, out); \
            } \
        } \
    }

GATHER(uint8_t, u8)
GATHER(float, f32)
GATHER(double, f64)
