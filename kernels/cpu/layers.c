/* The loops of layers as functions on arrays of any shape; module.c says what they return. */
#include "binding.h"

#include <string.h>


/* The arrays of one call. `fit` goes from FITS to OTHER or WRONG at the first that does not. */
typedef struct {
    Py_buffer views[5];
    int count;
    char format; /* of the arrays, but for sums and winners: 'f' or 'd' */
    verdict fit;
} tensors;

/* The array, or NULL: where it does not fit, or is None. */
static Py_buffer *tensor_of(tensors *taken, PyObject *object, int access, char format) {
    if (taken->fit != FITS || object == Py_None) return NULL;
    Py_buffer *view = &taken->views[taken->count];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | access) < 0) {
        PyErr_Clear();
        taken->fit = OTHER;
        return NULL;
    }
    taken->count++;
    const char *name = view->format ? view->format : "B";
    if (name[0] != format || name[1]) taken->fit = OTHER;
    return view;
}

/* An array of the type of all: the first says which. */
static Py_buffer *tensor(tensors *taken, PyObject *object, int access) {
    if (taken->format) return tensor_of(taken, object, access, taken->format);
    Py_buffer *view = tensor_of(taken, object, access, 'f');
    taken->format = 'f';
    if (view && view->format && !strcmp(view->format, "d")) {
        taken->format = 'd';
        taken->fit = FITS;
    }
    return view;
}

static void expect(tensors *taken, int agrees, const char *what) {
    if (taken->fit != FITS || agrees) return;
    PyErr_Format(PyExc_ValueError, "the arrays do not fit each other: %s", what);
    taken->fit = WRONG;
}

static Py_ssize_t elements(const Py_buffer *view) { return view->len / view->itemsize; }

static void expect_equal(tensors *taken, const Py_buffer *first, const Py_buffer *second) {
    if (taken->fit == FITS && second) expect(taken, elements(first) == elements(second), "sizes differ");
}

static void *memory(const Py_buffer *view) { return view ? view->buf : NULL; }

static PyObject *done(tensors *taken) {
    while (taken->count) PyBuffer_Release(&taken->views[--taken->count]);
    return taken->fit == WRONG ? NULL : PyBool_FromLong(taken->fit == FITS);
}

/* Run the loop of the arrays' type, without the GIL where that pays. */
#define RUN(taken, bytes, name, ...) \
    WITHOUT_GIL(bytes, { \
        if ((taken).format == 'f') name##_f32(__VA_ARGS__); \
        else name##_f64(__VA_ARGS__); \
    })

/* -- windows: (kernel, stride, padding, image, images, line, lines) -- */

static int read_numbers(PyObject *numbers, size_t *out) {
    if (!PyTuple_Check(numbers) || PyTuple_GET_SIZE(numbers) != 7) {
        PyErr_SetString(PyExc_TypeError, "windows and block are a tuple of 7 numbers");
        return 0;
    }
    for (Py_ssize_t i = 0; i < 7; i++) {
        out[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(numbers, i));
        if (PyErr_Occurred()) return 0;
    }
    return 1;
}

static PyObject *windows_call(PyObject *images, PyObject *rows, PyObject *numbers, int folds) {
    size_t given[7];
    if (!read_numbers(numbers, given)) return NULL;
    tensors taken = {0};
    Py_buffer *x = tensor(&taken, images, folds ? WRITE : READ), *matrix = tensor(&taken, rows, folds ? READ : WRITE);
    expect(&taken, taken.fit == FITS && x->ndim == 4, "images have 4 axes");
    if (taken.fit != FITS) return done(&taken);
    shoal_windows by = {(size_t)x->shape[1], (size_t)x->shape[2], (size_t)x->shape[3], given[0], given[1], given[2]};
    shoal_block block = {given[3], given[4], given[5], given[6]};
    size_t shorter = by.height < by.width ? by.height : by.width;
    int windows = by.kernel && by.stride && shorter + 2 * by.padding >= by.kernel;
    expect(&taken, windows, "a window is larger than the padded image");
    if (taken.fit != FITS) return done(&taken);
    int within = block.image + block.images <= (size_t)x->shape[0];
    within = within && block.line + block.lines <= shoal_along(&by, by.height);
    expect(&taken, within, "the block is not within the images");
    size_t row = by.kernel * by.kernel * by.channels, count = block.images * block.lines * shoal_along(&by, by.width);
    expect(&taken, (size_t)elements(matrix) == count * row, "the matrix has another size than the block's windows");
    if (taken.fit != FITS) return done(&taken);
    if (folds) RUN(taken, matrix->len, shoal_fold, matrix->buf, x->buf, &by, &block)
    else RUN(taken, matrix->len, shoal_unfold, x->buf, matrix->buf, &by, &block)
    return done(&taken);
}

PyObject *cpu_unfold(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    return count == 3 ? windows_call(args[0], args[1], args[2], 0) : no_such_call("unfold(x, rows, numbers)");
}

PyObject *cpu_fold(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    return count == 3 ? windows_call(args[1], args[0], args[2], 1) : no_such_call("fold(rows, x, numbers)");
}

/* The windows of a pooling from its images, and in `pixels` how many outputs they have. */
static shoal_windows pooled(tensors *taken, const Py_buffer *x, const Py_buffer *y, size_t size, size_t stride,
                            size_t *pixels) {
    shoal_windows by = {0};
    expect(taken, taken->fit == FITS && x->ndim == 4, "images have 4 axes");
    if (taken->fit != FITS) return by;
    by = (shoal_windows){(size_t)x->shape[1], (size_t)x->shape[2], (size_t)x->shape[3], size, stride, 0};
    expect(taken, size && stride && by.height >= size && by.width >= size, "a window is larger than the image");
    if (taken->fit != FITS) return by;
    *pixels = (size_t)x->shape[0] * shoal_along(&by, by.height) * shoal_along(&by, by.width);
    expect(taken, (size_t)elements(y) == *pixels * by.channels, "the outputs have another size than the windows");
    return by;
}

PyObject *cpu_max_pool(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) return no_such_call("max_pool(x, size, stride, y, winner)");
    size_t size = PyLong_AsSize_t(args[1]), stride = PyLong_AsSize_t(args[2]), pixels = 0;
    if (PyErr_Occurred()) return NULL;
    tensors taken = {0};
    Py_buffer *x = tensor(&taken, args[0], READ), *y = tensor(&taken, args[3], WRITE);
    Py_buffer *winner = tensor_of(&taken, args[4], WRITE, 'h');
    shoal_windows by = pooled(&taken, x, y, size, stride, &pixels);
    expect_equal(&taken, y, winner);
    if (taken.fit == FITS) RUN(taken, x->len, shoal_max_pool, x->buf, y->buf, memory(winner), pixels, &by)
    return done(&taken);
}

PyObject *cpu_max_pool_gradient(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) return no_such_call("max_pool_gradient(dy, winner, size, stride, dx)");
    size_t size = PyLong_AsSize_t(args[2]), stride = PyLong_AsSize_t(args[3]), pixels = 0;
    if (PyErr_Occurred()) return NULL;
    tensors taken = {0};
    Py_buffer *dx = tensor(&taken, args[4], WRITE), *dy = tensor(&taken, args[0], READ);
    Py_buffer *winner = tensor_of(&taken, args[1], READ, 'h');
    shoal_windows by = pooled(&taken, dx, dy, size, stride, &pixels);
    expect_equal(&taken, dy, winner);
    if (taken.fit == FITS) RUN(taken, dx->len, shoal_max_pool_gradient, dy->buf, winner->buf, dx->buf, pixels, &by)
    return done(&taken);
}

PyObject *cpu_mirror(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2) return no_such_call("mirror(w, out)");
    tensors taken = {0};
    Py_buffer *w = tensor(&taken, args[0], READ), *out = tensor(&taken, args[1], WRITE);
    expect(&taken, taken.fit == FITS && w->ndim == 4 && w->shape[0] == w->shape[1], "weights are (k, k, in, out)");
    expect_equal(&taken, w, out);
    if (taken.fit == FITS) {
        size_t kernel = (size_t)w->shape[0], inputs = (size_t)w->shape[2], outputs = (size_t)w->shape[3];
        RUN(taken, w->len, shoal_mirror, w->buf, out->buf, kernel, inputs, outputs)
    }
    return done(&taken);
}

/* -- features -- */

/* The axes of x, for so many groups and features; zero rows where x is empty. */
static shoal_rows rows_of(tensors *taken, const Py_buffer *x, Py_ssize_t groups, Py_ssize_t features) {
    shoal_rows of = {0};
    if (taken->fit != FITS) return of;
    Py_ssize_t each = groups * features;
    expect(taken, each > 0 && elements(x) % each == 0, "rows are not whole");
    if (taken->fit != FITS) return of;
    of.groups = (size_t)groups;
    of.features = (size_t)features;
    of.rows = (size_t)(elements(x) / each);
    return of;
}

static shoal_rows rows_of_sums(tensors *taken, const Py_buffer *x, const Py_buffer *sums) {
    shoal_rows of = {0};
    if (taken->fit != FITS) return of;
    expect(taken, sums->ndim == 3 && sums->shape[0] == 2, "sums are (2, groups, features)");
    return taken->fit == FITS ? rows_of(taken, x, sums->shape[1], sums->shape[2]) : of;
}

PyObject *cpu_moments(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2) return no_such_call("moments(x, sums)");
    tensors taken = {0};
    Py_buffer *x = tensor(&taken, args[0], READ), *sums = tensor_of(&taken, args[1], WRITE, 'd');
    shoal_rows of = rows_of_sums(&taken, x, sums);
    if (taken.fit == FITS) RUN(taken, x->len, shoal_moments, x->buf, sums->buf, &of)
    return done(&taken);
}

PyObject *cpu_gradient_moments(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) return no_such_call("gradient_moments(dy, x, y, dz, sums)");
    tensors taken = {0};
    Py_buffer *dy = tensor(&taken, args[0], READ), *x = tensor(&taken, args[1], READ);
    Py_buffer *y = tensor(&taken, args[2], READ), *dz = tensor(&taken, args[3], WRITE);
    Py_buffer *sums = tensor_of(&taken, args[4], WRITE, 'd');
    shoal_rows of = rows_of_sums(&taken, x, sums);
    expect_equal(&taken, x, dy);
    expect_equal(&taken, x, y);
    expect_equal(&taken, x, dz);
    if (taken.fit == FITS)
        RUN(taken, x->len, shoal_gradient_moments, dy->buf, x->buf, memory(y), memory(dz), sums->buf, &of)
    return done(&taken);
}

PyObject *cpu_masked(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3) return no_such_call("masked(dy, y, dz)");
    tensors taken = {0};
    Py_buffer *dy = tensor(&taken, args[0], READ), *y = tensor(&taken, args[1], READ);
    Py_buffer *dz = tensor(&taken, args[2], WRITE);
    expect_equal(&taken, dy, y);
    expect_equal(&taken, dy, dz);
    if (taken.fit == FITS) RUN(taken, dy->len, shoal_masked, dy->buf, y->buf, dz->buf, (size_t)elements(dy))
    return done(&taken);
}

PyObject *cpu_affine(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 6) return no_such_call("affine(x, scale, shift, beside, out, relu)");
    int relu = PyObject_IsTrue(args[5]);
    if (relu < 0) return NULL;
    tensors taken = {0};
    Py_buffer *x = tensor(&taken, args[0], READ), *scale = tensor(&taken, args[1], READ);
    Py_buffer *shift = tensor(&taken, args[2], READ), *beside = tensor(&taken, args[3], READ);
    Py_buffer *out = tensor(&taken, args[4], WRITE);
    expect(&taken, taken.fit == FITS && scale->ndim == 2, "a scale is (groups, features)");
    if (taken.fit != FITS) return done(&taken);
    shoal_rows of = rows_of(&taken, x, scale->shape[0], scale->shape[1]);
    expect_equal(&taken, scale, shift);
    expect_equal(&taken, x, beside);
    expect_equal(&taken, x, out);
    if (taken.fit == FITS)
        RUN(taken, x->len, shoal_affine, x->buf, scale->buf, memory(shift), memory(beside), out->buf, &of, relu)
    return done(&taken);
}

PyObject *cpu_affine_gradient(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) return no_such_call("affine_gradient(dy, x, y, factors, dx)");
    tensors taken = {0};
    Py_buffer *dy = tensor(&taken, args[0], READ), *x = tensor(&taken, args[1], READ);
    Py_buffer *y = tensor(&taken, args[2], READ), *factors = tensor(&taken, args[3], READ);
    Py_buffer *dx = tensor(&taken, args[4], WRITE);
    expect(&taken, taken.fit == FITS && factors->ndim == 2 && factors->shape[0] == 3, "factors are (3, features)");
    if (taken.fit != FITS) return done(&taken);
    shoal_rows of = rows_of(&taken, x, 1, factors->shape[1]);
    expect_equal(&taken, x, dy);
    expect_equal(&taken, x, y);
    expect_equal(&taken, x, dx);
    if (taken.fit == FITS)
        RUN(taken, x->len, shoal_affine_gradient, dy->buf, x->buf, memory(y), factors->buf, dx->buf, &of)
    return done(&taken);
}
