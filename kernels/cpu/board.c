/* Barrier(board, members, me): the barrier of some ranks, on a board in memory that they share. */
#include "binding.h"

#include <string.h>

static int refuse(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

static int take_board(Barrier *self, PyObject *board) {
    if (PyObject_GetBuffer(board, &self->view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return -1;
    self->has_view = 1;
    self->board = self->view.buf;
    if (self->view.itemsize != 8 || self->view.len % (8 * SHOAL_LINE))
        return refuse("a board is a C-contiguous array of 64-bit integers, 8 for each rank");
    if ((uintptr_t)self->board % (8 * SHOAL_LINE)) return refuse("a board starts at a multiple of 64 bytes");
    return 0;
}

static int take_members(Barrier *self, PyObject *members) {
    int64_t ranks = self->view.len / (8 * SHOAL_LINE);
    int present = 0;
    self->count = (size_t)PySequence_Fast_GET_SIZE(members);
    self->members = PyMem_Calloc(self->count + 1, sizeof *self->members);
    if (!self->members) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < self->count; i++) {
        int64_t rank = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(members, (Py_ssize_t)i));
        if (rank == -1 && PyErr_Occurred()) return -1;
        if (rank < 0 || rank >= ranks) return refuse("a member has no line on the board");
        self->members[i] = rank;
        present |= rank == self->me;
    }
    return present ? 0 : refuse("`me` is not a member");
}

static PyObject *barrier_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *board, *given;
    long long me;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OOL", &board, &given, &me)) return NULL;
    PyObject *members = PySequence_Fast(given, "members is a sequence of ranks");
    if (!members) return NULL;
    Barrier *self = (Barrier *)type->tp_alloc(type, 0);
    if (self) {
        self->me = me;
        if (take_board(self, board) < 0 || take_members(self, members) < 0) Py_CLEAR(self);
    }
    Py_DECREF(members);
    return (PyObject *)self;
}

static void barrier_dealloc(Barrier *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->has_view) PyBuffer_Release(&self->view);
    PyMem_Free(self->members);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *barrier_arrive(PyObject *object, PyObject *given) {
    Barrier *self = (Barrier *)object;
    int64_t sequence = PyLong_AsLongLong(given);
    if (sequence == -1 && PyErr_Occurred()) return NULL;
    shoal_arrive(self->board, self->me, sequence);
    Py_RETURN_NONE;
}

/* Holds the GIL while it looks whether all are there already, and not while it waits. */
static PyObject *barrier_wait(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Barrier *self = (Barrier *)object;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "the call is wait(sequence, spins, yields, deadline_s)");
    int64_t sequence = PyLong_AsLongLong(args[0]);
    shoal_patience patience = {PyLong_AsLong(args[1]), PyLong_AsLong(args[2]), PyFloat_AsDouble(args[3]), NULL};
    if (PyErr_Occurred()) return NULL;
    int64_t missing = shoal_missing(self->board, self->members, self->count, sequence);
    if (missing >= 0) {
        Py_BEGIN_ALLOW_THREADS
        missing = shoal_wait(self->board, self->members, self->count, sequence, &patience);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(missing);
}

static PyMethodDef methods[] = {
    {"arrive", barrier_arrive, METH_O, NULL},
    {"wait", (PyCFunction)(void (*)(void))barrier_wait, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)barrier_new},
    {Py_tp_dealloc, (void *)barrier_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec barrier_spec = {"shoal.kernels._cpu.Barrier", sizeof(Barrier), 0, Py_TPFLAGS_DEFAULT, slots};
