/* The gather of samples as a function on arrays of any shape; module.c says what it returns. */
#include "binding.h"

#include <string.h>

/* The views of a gather, in the order of the call's arguments. */
enum { SAMPLES, INDICES, MOVES, SHIFT, SCALE, OUT, VIEWS };

/* What the views hold, if it is one call: how a sample is cut into rows follows from shift, of one row. */
static verdict gathered(const Py_buffer *views, int moves, shoal_chosen *chosen, shoal_image *image) {
    const Py_buffer *samples = &views[SAMPLES], *out = &views[OUT];
    if (samples->ndim < 2 || out->ndim != samples->ndim || !views[SHIFT].len) return OTHER;
    size_t count = (size_t)out->shape[0], size = 1, row = (size_t)views[SHIFT].len / sizeof(float);
    for (int i = 1; i < samples->ndim; i++) {
        if (samples->shape[i] != out->shape[i]) return OTHER;
        size *= (size_t)samples->shape[i];
    }
    image->channels = (size_t)samples->shape[samples->ndim - 1];
    if (!size || size % row || row % image->channels || views[SCALE].len != views[SHIFT].len) return OTHER;
    image->rows = size / row;
    image->width = row / image->channels;
    image->shift = views[SHIFT].buf;
    image->scale = views[SCALE].buf;
    *chosen = (shoal_chosen){count, views[INDICES].buf, moves ? views[MOVES].buf : NULL};
    if ((size_t)views[INDICES].len != count * sizeof(int64_t)) return OTHER;
    if (moves && (size_t)views[MOVES].len != 3 * count * sizeof(int64_t)) return OTHER;
    for (size_t i = 0; i < count; i++)
        if (chosen->indices[i] < 0 || chosen->indices[i] >= samples->shape[0]) {
            PyErr_Format(PyExc_IndexError, "there is no sample %lld", (long long)chosen->indices[i]);
            return WRONG;
        }
    return FITS;
}

PyObject *cpu_gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != VIEWS) return no_such_call("gather(samples, indices, moves, shift, scale, out)");
    static const char *const formats[] = {"Bfd", "l", "l", "f", "f", "f"};
    Py_buffer views[VIEWS] = {0};
    int moves = args[MOVES] != Py_None;
    verdict fit = FITS;
    for (int i = 0; i < VIEWS && fit == FITS; i++) {
        char format;
        if (i == MOVES && !moves) continue;
        fit = take_block(&views[i], args[i], i == OUT ? WRITE : READ, &format);
        if (fit == FITS && !strchr(formats[i], format)) fit = OTHER;
    }
    shoal_chosen chosen;
    shoal_image image;
    if (fit == FITS) fit = gathered(views, moves, &chosen, &image);
    if (fit == FITS) {
        const void *samples = views[SAMPLES].buf;
        float *out = views[OUT].buf;
        Py_ssize_t each = views[SAMPLES].itemsize;
        WITHOUT_GIL(views[OUT].len, {
            if (each == 1) shoal_gather_u8(samples, &chosen, &image, out);
            else if (each == 4) shoal_gather_f32(samples, &chosen, &image, out);
            else shoal_gather_f64(samples, &chosen, &image, out);
        })
    }
    for (int i = 0; i < VIEWS; i++) PyBuffer_Release(&views[i]);
    return fit == WRONG ? NULL : PyBool_FromLong(fit == FITS);
}
