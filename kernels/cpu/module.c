/* shoal.kernels._cpu: the loops as functions on flat arrays.

   A function returns True when it did the work, and False when the arrays are not of its kind (one-dimensional,
   C-contiguous, native float32 or float64, all the same): then the NumPy twin does it. Sizes that differ are a
   ValueError. (`gather` takes samples of any shape.) The GIL is released around work that takes longer than handing it
   over and back does. */
#include "binding.h"

#include <string.h>

static PyObject *no_such_call(const char *usage) { return PyErr_Format(PyExc_TypeError, "the call is %s", usage); }

static PyObject *cpu_delta(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3) return no_such_call("delta(w, a, out)");
    arrays taken = {0};
    verdict fit = take(&taken, args[0], READ);
    if (fit == FITS) fit = take(&taken, args[1], READ);
    if (fit == FITS) fit = take(&taken, args[2], WRITE);
    if (fit == FITS) {
        void *w = taken.views[0].buf, *a = taken.views[1].buf, *out = taken.views[2].buf;
        size_t n = (size_t)taken.size;
        WITHOUT_GIL(bytes_of(&taken), {
            if (taken.format == 'f') shoal_delta_f32(w, a, out, n);
            else shoal_delta_f64(w, a, out, n);
        })
    }
    return give_back(&taken, fit);
}

static PyObject *cpu_local_step(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 8) return no_such_call("local_step(w, g, m, rate, beta, nesterov, weight_decay, decayed)");
    shoal_step step = {.rate = PyFloat_AsDouble(args[3]), .beta = PyFloat_AsDouble(args[4])};
    step.nesterov = PyObject_IsTrue(args[5]);
    step.decay = PyFloat_AsDouble(args[6]);
    step.decays = step.decay != 0;
    Py_ssize_t decayed = PyLong_AsSsize_t(args[7]);
    if (PyErr_Occurred()) return NULL;
    arrays taken = {0};
    verdict fit = take(&taken, args[0], WRITE);
    if (fit == FITS) fit = take(&taken, args[1], READ);
    if (fit == FITS && args[2] != Py_None) fit = take(&taken, args[2], WRITE);
    if (fit == FITS && (decayed < 0 || decayed > taken.size)) {
        PyErr_Format(PyExc_ValueError, "decayed is %zd, and the array has %zd elements", decayed, taken.size);
        fit = WRONG;
    }
    if (fit == FITS) {
        void *w = taken.views[0].buf, *g = taken.views[1].buf, *m = taken.count > 2 ? taken.views[2].buf : NULL;
        step.decayed = (size_t)decayed;
        WITHOUT_GIL(bytes_of(&taken), {
            if (taken.format == 'f') shoal_local_step_f32(w, g, m, (size_t)taken.size, &step);
            else shoal_local_step_f64(w, g, m, (size_t)taken.size, &step);
        })
    }
    return give_back(&taken, fit);
}

/* float32 against a 16-bit type: 'e' is NumPy's half, 'H' holds the bits of a bfloat16. */
static PyObject *convert(PyObject *wide, PyObject *narrow, int packing) {
    arrays floats = {0}, halves = {0};
    verdict fit = take(&floats, wide, packing ? READ : WRITE);
    if (fit == FITS) fit = floats.format == 'f' ? take(&halves, narrow, packing ? WRITE : READ) : OTHER;
    if (fit == FITS && halves.format != 'e' && halves.format != 'H') fit = OTHER;
    if (fit == FITS && floats.size != halves.size) {
        PyErr_Format(PyExc_ValueError, "the arrays have %zd and %zd elements", floats.size, halves.size);
        fit = WRONG;
    }
    if (fit == FITS) {
        float *x = floats.views[0].buf;
        uint16_t *h = halves.views[0].buf;
        size_t n = (size_t)floats.size;
        WITHOUT_GIL(bytes_of(&floats), {
            if (halves.format == 'e' && packing) shoal_pack_f16(x, h, n);
            else if (halves.format == 'e') shoal_unpack_f16(h, x, n);
            else if (packing) shoal_pack_bf16(x, h, n);
            else shoal_unpack_bf16(h, x, n);
        })
    }
    Py_XDECREF(give_back(&halves, OTHER));
    return give_back(&floats, fit);
}

static PyObject *cpu_pack(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    return count == 2 ? convert(args[0], args[1], 1) : no_such_call("pack(x, out)");
}

static PyObject *cpu_unpack(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    return count == 2 ? convert(args[1], args[0], 0) : no_such_call("unpack(packed, out)");
}

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

static PyObject *cpu_gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
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

static PyMethodDef functions[] = {
    {"delta", (PyCFunction)(void (*)(void))cpu_delta, METH_FASTCALL, NULL},
    {"gather", (PyCFunction)(void (*)(void))cpu_gather, METH_FASTCALL, NULL},
    {"local_step", (PyCFunction)(void (*)(void))cpu_local_step, METH_FASTCALL, NULL},
    {"pack", (PyCFunction)(void (*)(void))cpu_pack, METH_FASTCALL, NULL},
    {"unpack", (PyCFunction)(void (*)(void))cpu_unpack, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

#if defined(__clang__)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define COMPILER "clang " TEXT(__clang_major__) "." TEXT(__clang_minor__) "." TEXT(__clang_patchlevel__)
#else
#define COMPILER "gcc " __VERSION__
#endif
#ifndef SHOAL_FLAGS
#define SHOAL_FLAGS "portable"
#endif

/* What the compiler was told to use and this CPU has not, or NULL: better a sentence than an illegal instruction. */
static const char *lacking(void) {
#if defined(__x86_64__)
#define NEEDS(feature) \
    if (!__builtin_cpu_supports(feature)) return feature;
    __builtin_cpu_init();
#ifdef __AVX__
    NEEDS("avx")
#endif
#ifdef __AVX2__
    NEEDS("avx2")
#endif
#ifdef __FMA__
    NEEDS("fma")
#endif
#ifdef __BMI2__
    NEEDS("bmi2")
#endif
#ifdef __AVX512F__
    NEEDS("avx512f")
#endif
#ifdef __AVX512VL__
    NEEDS("avx512vl")
#endif
#endif
    return NULL;
}

static int start(PyObject *module) {
    const char *missing = lacking();
    if (missing) {
        PyErr_Format(PyExc_ImportError, "the compiled kernels need %s, which this CPU lacks", missing);
        return -1;
    }
    if (add_type(module, &terms_spec, "Terms") < 0 || add_type(module, &barrier_spec, "Barrier") < 0) return -1;
    if (add_type(module, &meeting_spec, "Meeting") < 0) return -1;
    if (PyModule_AddStringConstant(module, "COMPILER", COMPILER) < 0) return -1;
    return PyModule_AddStringConstant(module, "FLAGS", SHOAL_FLAGS);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)start},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "shoal.kernels._cpu", "The hot loops in C.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&definition); }
