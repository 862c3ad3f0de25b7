/* Terms(parts, joins): what a reduction adds, taken and checked once, then used every round.

   `joins` is a bytes object. Raises TypeError where the parts are not of this kind, ValueError where sizes differ or
   the joins do not leave one sum. */
#include "binding.h"

#include <string.h>

static int joins_fit(const unsigned char *joins, Py_ssize_t count) {
    Py_ssize_t depth = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (++depth > SHOAL_DEPTH || joins[i] >= depth) return 0;
        depth -= joins[i];
    }
    return depth == 1;
}

static int hold(Terms *self, PyObject *part) {
    Py_buffer *view = &self->views[self->held];
    char format;
    if (take_view(view, part, READ, &format) != FITS) {
        PyErr_SetString(PyExc_TypeError, "a part is not a flat array of a kernel's kind");
        return -1;
    }
    size_t size = (size_t)(view->len / view->itemsize);
    self->parts[self->held] = view->buf;
    if (!self->held++) {
        self->format = format;
        self->terms.size = size;
    }
    if (format != self->format || !strchr("fd", format)) {
        PyErr_SetString(PyExc_TypeError, "the parts are not all float32 or all float64");
        return -1;
    }
    if (size == self->terms.size) return 0;
    PyErr_Format(PyExc_ValueError, "the parts have %zu and %zu elements", self->terms.size, size);
    return -1;
}

static int fill(Terms *self, PyObject *parts, const char *joins, Py_ssize_t count) {
    if (count < 1 || count != PySequence_Fast_GET_SIZE(parts) || !joins_fit((const unsigned char *)joins, count)) {
        PyErr_SetString(PyExc_ValueError, "the joins do not leave one sum of the parts");
        return -1;
    }
    self->views = PyMem_Calloc((size_t)count, sizeof *self->views);
    self->parts = PyMem_Calloc((size_t)count, sizeof *self->parts);
    self->joins = PyMem_Calloc((size_t)count, 1);
    if (!self->views || !self->parts || !self->joins) return PyErr_NoMemory(), -1;
    memcpy(self->joins, joins, (size_t)count);
    for (Py_ssize_t i = 0; i < count; i++)
        if (hold(self, PySequence_Fast_GET_ITEM(parts, i)) < 0) return -1;
    self->terms.count = (size_t)count;
    self->terms.parts = self->parts;
    self->terms.joins = self->joins;
    return 0;
}

static PyObject *terms_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *given;
    const char *joins;
    Py_ssize_t count;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "Oy#", &given, &joins, &count)) return NULL;
    PyObject *parts = PySequence_Fast(given, "parts is a sequence of arrays");
    if (!parts) return NULL;
    Terms *self = (Terms *)type->tp_alloc(type, 0);
    if (self && fill(self, parts, joins, count) < 0) Py_CLEAR(self);
    Py_DECREF(parts);
    return (PyObject *)self;
}

static void terms_dealloc(Terms *self) {
    PyTypeObject *type = Py_TYPE(self);
    while (self->held) PyBuffer_Release(&self->views[--self->held]);
    PyMem_Free(self->views);
    PyMem_Free(self->parts);
    PyMem_Free(self->joins);
    type->tp_free(self);
    Py_DECREF(type);
}

/* The arguments of a rule: first `inputs` arrays to read, then as many outputs, then its numbers. */
static PyObject *reduce(Terms *self, shoal_move *move, PyObject *const *objects, int inputs, int outputs) {
    arrays taken = {.count = 0};
    verdict fit = FITS;
    for (int i = 0; i < inputs + outputs && fit == FITS; i++) fit = take(&taken, objects[i], i < inputs ? READ : WRITE);
    if (fit == FITS && taken.format != self->format) fit = OTHER;
    if (fit == FITS && (size_t)taken.size != self->terms.size) {
        PyErr_Format(PyExc_ValueError, "the parts have %zu elements, the arrays %zd", self->terms.size, taken.size);
        fit = WRONG;
    }
    if (fit == FITS) {
        move->a = inputs ? taken.views[0].buf : NULL;
        move->v = inputs > 1 ? taken.views[1].buf : NULL;
        move->a_out = taken.views[inputs].buf;
        move->v_out = outputs > 1 ? taken.views[inputs + 1].buf : NULL;
        Py_ssize_t bytes = ((Py_ssize_t)self->terms.count + taken.count) * taken.views[0].len;
        WITHOUT_GIL(bytes, {
            if (self->format == 'f') shoal_reduce_f32(&self->terms, move);
            else shoal_reduce_f64(&self->terms, move);
        })
    }
    return give_back(&taken, fit);
}

/* Numbers, into the doubles that follow each other from `to` on. */
static int numbers(PyObject *const *objects, int count, double *const *to) {
    for (int i = 0; i < count; i++) {
        *to[i] = PyFloat_AsDouble(objects[i]);
        if (*to[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static PyObject *apply(Terms *self, shoal_rule rule, PyObject *const *args, Py_ssize_t count) {
    static const struct {
        int inputs, outputs, scalars;
        const char *usage;
    } shapes[] = {
        [SHOAL_SUM] = {0, 1, 1, "sum(out, scale)"},
        [SHOAL_STATISTICS] = {1, 1, 1, "statistics(a, a_out, scale)"},
        [SHOAL_DISPLACEMENT] = {2, 2, 2, "displacement(a, v, a_out, v_out, scale, mu)"},
        [SHOAL_PER_RATE] = {2, 2, 3, "per_rate(a, v, a_out, v_out, scale, mu, rate)"},
    };
    int objects = shapes[rule].inputs + shapes[rule].outputs;
    if (count != objects + shapes[rule].scalars)
        return PyErr_Format(PyExc_TypeError, "the call is %s", shapes[rule].usage);
    shoal_move move = {.rule = rule};
    double *const to[] = {&move.scale, &move.mu, &move.rate};
    if (numbers(args + objects, shapes[rule].scalars, to) < 0) return NULL;
    return reduce(self, &move, args, shapes[rule].inputs, shapes[rule].outputs);
}

static PyObject *terms_sum(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return apply((Terms *)self, SHOAL_SUM, args, count);
}

static PyObject *terms_statistics(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return apply((Terms *)self, SHOAL_STATISTICS, args, count);
}

static PyObject *terms_displacement(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return apply((Terms *)self, SHOAL_DISPLACEMENT, args, count);
}

static PyObject *terms_per_rate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return apply((Terms *)self, SHOAL_PER_RATE, args, count);
}

static PyMethodDef methods[] = {
    {"sum", (PyCFunction)(void (*)(void))terms_sum, METH_FASTCALL, NULL},
    {"statistics", (PyCFunction)(void (*)(void))terms_statistics, METH_FASTCALL, NULL},
    {"displacement", (PyCFunction)(void (*)(void))terms_displacement, METH_FASTCALL, NULL},
    {"per_rate", (PyCFunction)(void (*)(void))terms_per_rate, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)terms_new},
    {Py_tp_dealloc, (void *)terms_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec terms_spec = {"shoal.kernels._cpu.Terms", sizeof(Terms), 0, Py_TPFLAGS_DEFAULT, slots};
