/* Meeting(barrier, moves, hub): a whole reduction among ranks that share memory, in one call without the GIL.

   All arrive; then each does its moves (a rule of `Terms` on arrays) for its own slice, and all arrive again. Or,
   for short arrays, with a line of the board as `hub`: whoever comes last does the moves, which are then those of
   everything, and tells the others on the hub; that is one wait for each rank instead of two.

   `run` comes back when a deadline passes, with the member that is missing; the next call with the same sequence
   number goes on where that one stopped. */
#include "binding.h"

#include <string.h>

typedef struct {
    Terms *terms;
    shoal_move move;
    Py_ssize_t held;
    Py_buffer views[4];
} Move;

typedef struct {
    PyObject_HEAD
    Barrier *barrier;
    int64_t *hub; /* NULL: each its slice */
    Py_ssize_t count, bytes;
    Move *moves;
    int64_t sequence;
    int stage; /* of `sequence`: 0 not arrived, 1 arrived, 2 its work done */
} Meeting;

static const struct {
    int inputs, outputs;
} shapes[] = {[SHOAL_SUM] = {0, 1}, [SHOAL_STATISTICS] = {1, 1}, [SHOAL_DISPLACEMENT] = {2, 2}, [SHOAL_PER_RATE] = {2, 2}};

static int hold(Move *move, PyObject *array, int access) {
    char format;
    Py_buffer *view = &move->views[move->held];
    if (take_view(view, array, access, &format) != FITS) {
        PyErr_SetString(PyExc_TypeError, "an array of a move is not flat, or not of a kernel's kind");
        return -1;
    }
    move->held++;
    if (format == move->terms->format && (size_t)(view->len / view->itemsize) == move->terms->terms.size) return 0;
    PyErr_SetString(PyExc_ValueError, "an array of a move differs from its parts in type or size");
    return -1;
}

/* (terms, rule, (arrays...), scale, decay): first the arrays that are read, then those that are written; a decay that is
   not None says that the parts are gradients. */
static int fill(Move *move, PyObject *given, PyTypeObject *terms_type) {
    PyObject *terms, *listed, *decay;
    int rule;
    if (!PyArg_ParseTuple(given, "O!iO!dO", terms_type, &terms, &rule, &PyTuple_Type, &listed, &move->move.scale, &decay))
        return -1;
    if (rule < SHOAL_SUM || rule > SHOAL_PER_RATE || PyTuple_GET_SIZE(listed) != shapes[rule].inputs + shapes[rule].outputs) {
        PyErr_SetString(PyExc_ValueError, "a move has no such rule, or not its number of arrays");
        return -1;
    }
    int inputs = shapes[rule].inputs, outputs = shapes[rule].outputs;
    move->move.gradients = inputs && decay != Py_None;
    move->move.decay = move->move.gradients ? PyFloat_AsDouble(decay) : 0;
    if (PyErr_Occurred()) return -1;
    Py_INCREF(terms);
    move->terms = (Terms *)terms;
    for (int i = 0; i < inputs + outputs; i++)
        if (hold(move, PyTuple_GET_ITEM(listed, i), i < inputs ? READ : WRITE) < 0) return -1;
    move->move.rule = (shoal_rule)rule;
    move->move.a = inputs ? move->views[0].buf : NULL;
    move->move.v = inputs > 1 ? move->views[1].buf : NULL;
    move->move.a_out = move->views[inputs].buf;
    move->move.v_out = outputs > 1 ? move->views[inputs + 1].buf : NULL;
    return 0;
}

static int fill_all(Meeting *self, PyObject *moves, PyTypeObject *terms_type) {
    Py_ssize_t count = PyTuple_GET_SIZE(moves);
    self->moves = PyMem_Calloc((size_t)count + 1, sizeof *self->moves);
    if (!self->moves) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        self->count++;
        if (fill(&self->moves[i], PyTuple_GET_ITEM(moves, i), terms_type) < 0) return -1;
        self->bytes += (Py_ssize_t)self->moves[i].terms->terms.count * self->moves[i].views[0].len;
    }
    return 0;
}

static int take_hub(Meeting *self, Py_ssize_t hub) {
    Barrier *at = self->barrier;
    if (hub < 0) return 0;
    int taken = hub >= at->view.len / (8 * SHOAL_LINE);
    for (size_t i = 0; i < at->count; i++) taken |= at->members[i] == hub;
    if (taken) {
        PyErr_SetString(PyExc_ValueError, "a hub is a line of the board that is no member's");
        return -1;
    }
    self->hub = at->board + SHOAL_LINE * hub;
    return 0;
}

static PyObject *meeting_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *barrier, *moves, *module = PyType_GetModule(type);
    Py_ssize_t hub;
    (void)keywords;
    if (!module) return NULL;
    PyObject *barrier_type = PyObject_GetAttrString(module, "Barrier"), *terms_type = PyObject_GetAttrString(module, "Terms");
    Meeting *self = NULL;
    if (barrier_type && terms_type &&
        PyArg_ParseTuple(args, "O!O!n", barrier_type, &barrier, &PyTuple_Type, &moves, &hub)) {
        self = (Meeting *)type->tp_alloc(type, 0);
        if (self) {
            Py_INCREF(barrier);
            self->barrier = (Barrier *)barrier;
            if (take_hub(self, hub) < 0 || fill_all(self, moves, (PyTypeObject *)terms_type) < 0) Py_CLEAR(self);
        }
    }
    Py_XDECREF(barrier_type);
    Py_XDECREF(terms_type);
    return (PyObject *)self;
}

static void meeting_dealloc(Meeting *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Move *move = &self->moves[i];
        while (move->held) PyBuffer_Release(&move->views[--move->held]);
        Py_XDECREF(move->terms);
    }
    PyMem_Free(self->moves);
    Py_XDECREF(self->barrier);
    type->tp_free(self);
    Py_DECREF(type);
}

static void work(Meeting *self, double mu, double rate) {
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Move *at = &self->moves[i];
        at->move.mu = mu;
        at->move.rate = rate;
        if (at->terms->format == 'f') shoal_reduce_f32(&at->terms->terms, &at->move);
        else shoal_reduce_f64(&at->terms->terms, &at->move);
    }
}

/* Whoever sleeps until this rank arrives is woken before long work, or where this rank would sleep itself, or at the
   end: the fence costs a miss of the cache, which else passes while this rank looks at the others' lines. */
static int64_t by_slices(Meeting *self, double mu, double rate, shoal_patience *patience) {
    Barrier *at = self->barrier;
    int64_t *own = at->board + SHOAL_LINE * at->me;
    patience->posted = own;
    if (self->stage == 1) {
        int64_t missing = shoal_wait(at->board, at->members, at->count, self->sequence, patience);
        if (patience->posted && (missing >= 0 || self->bytes > SHORT_BYTES)) shoal_wake(own);
        if (missing >= 0) return missing;
        work(self, mu, rate);
        shoal_post(own, self->sequence + 1);
        patience->posted = own;
        self->stage = 2;
    }
    int64_t missing = shoal_wait(at->board, at->members, at->count, self->sequence + 1, patience);
    if (patience->posted) shoal_wake(own);
    return missing;
}

/* Each has written its arrival before it looks at the others', so the last one sees all. Nobody sleeps on the line of
   a rank here, but on the hub. Where the last one comes as the deadline passes, nobody is missing and nobody has taken
   the work yet: this rank asks for it too. */
static int64_t by_the_last(Meeting *self, double mu, double rate, shoal_patience *patience) {
    Barrier *at = self->barrier;
    int64_t zero = 0, next = self->sequence + 1, missing;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    do {
        missing = shoal_missing(at->board, at->members, at->count, self->sequence);
        if (missing < 0 && shoal_claim(self->hub, self->sequence, at->me)) {
            work(self, mu, rate);
            shoal_arrive(self->hub, 0, next);
            return -1;
        }
        if (shoal_wait(self->hub, &zero, 1, next, patience) < 0) return -1;
        missing = shoal_missing(at->board, at->members, at->count, self->sequence);
        if (missing < 0) missing = shoal_claimer(self->hub, self->sequence);
    } while (missing < 0);
    return missing;
}

static PyObject *meeting_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Meeting *self = (Meeting *)object;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "the call is run(sequence, mu, rate, spins, yields, deadline_s)");
    int64_t sequence = PyLong_AsLongLong(args[0]);
    double mu = PyFloat_AsDouble(args[1]), rate = PyFloat_AsDouble(args[2]);
    shoal_patience patience = {PyLong_AsLong(args[3]), PyLong_AsLong(args[4]), PyFloat_AsDouble(args[5]), NULL};
    if (PyErr_Occurred()) return NULL;
    int64_t missing;
    Py_BEGIN_ALLOW_THREADS
    if (self->sequence != sequence || !self->stage) {
        self->sequence = sequence;
        self->stage = 1;
        shoal_post(self->barrier->board + SHOAL_LINE * self->barrier->me, sequence);
    }
    missing = self->hub ? by_the_last(self, mu, rate, &patience) : by_slices(self, mu, rate, &patience);
    if (missing < 0) self->stage = 0;
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(missing);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))meeting_run, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)meeting_new},
    {Py_tp_dealloc, (void *)meeting_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec meeting_spec = {"shoal.kernels._cpu.Meeting", sizeof(Meeting), 0, Py_TPFLAGS_DEFAULT, slots};
