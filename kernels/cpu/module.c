/* shoal.kernels._cpu: the loops as functions on flat arrays.

   A function returns True when it did the work, and False when the arrays are not of its kind (one-dimensional,
   C-contiguous, native float32 or float64, all the same): then the NumPy twin does it. Sizes that differ are a
   ValueError. The GIL is released around work that takes longer than handing it over and back does. */
#include "binding.h"

PyObject *no_such_call(const char *usage) { return PyErr_Format(PyExc_TypeError, "the call is %s", usage); }

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

/* An array that may be None; *at becomes its memory. */
static verdict take_memory(arrays *taken, PyObject *object, int access, void **at) {
    *at = NULL;
    if (object == Py_None) return FITS;
    verdict fit = take(taken, object, access);
    if (fit == FITS) *at = taken->views[taken->count - 1].buf;
    return fit;
}

static PyObject *cpu_local_step(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 11)
        return no_such_call("local_step(w, m, g, a, w_out, m_out, rate, beta, nesterov, weight_decay, decayed)");
    shoal_step step = {.rate = PyFloat_AsDouble(args[6]), .beta = PyFloat_AsDouble(args[7])};
    step.nesterov = PyObject_IsTrue(args[8]);
    step.decay = PyFloat_AsDouble(args[9]);
    step.decays = step.decay != 0;
    Py_ssize_t decayed = PyLong_AsSsize_t(args[10]);
    if (PyErr_Occurred()) return NULL;
    arrays taken = {0};
    verdict fit = FITS;
    void *at[6];
    for (int i = 0; i < 6 && fit == FITS; i++) fit = take_memory(&taken, args[i], i < 4 ? READ : WRITE, &at[i]);
    if (fit == FITS && (!at[0] || !at[2] || !at[4] || !at[1] != !at[5])) fit = OTHER;
    if (fit == FITS && (decayed < 0 || decayed > taken.size)) {
        PyErr_Format(PyExc_ValueError, "decayed is %zd, and the array has %zd elements", decayed, taken.size);
        fit = WRONG;
    }
    if (fit == FITS) {
        step.w = at[0], step.m = at[1], step.g = at[2], step.a = at[3], step.w_out = at[4], step.m_out = at[5];
        step.decayed = (size_t)decayed;
        WITHOUT_GIL(bytes_of(&taken), {
            if (taken.format == 'f') shoal_local_step_f32(&step, (size_t)taken.size);
            else shoal_local_step_f64(&step, (size_t)taken.size);
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

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))cpu_##name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    METHOD(delta),
    METHOD(local_step),
    METHOD(pack),
    METHOD(unpack),
    METHOD(unfold),
    METHOD(fold),
    METHOD(max_pool),
    METHOD(max_pool_gradient),
    METHOD(mirror),
    METHOD(moments),
    METHOD(affine),
    METHOD(masked),
    METHOD(gradient_moments),
    METHOD(affine_gradient),
    METHOD(gather),
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
