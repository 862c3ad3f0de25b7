/* What the files of the Python binding share: taking arrays by the buffer protocol, and letting go of the GIL. */
#ifndef SHOAL_BINDING_H
#define SHOAL_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

typedef enum { FITS, OTHER, WRONG } verdict; /* OTHER: not of this kind; WRONG: an exception is set */
enum { READ = 0, WRITE = PyBUF_WRITABLE };

/* Arrays of one call: of one format and one size. */
typedef struct {
    Py_buffer views[6];
    int count;
    char format;
    Py_ssize_t size;
} arrays;

verdict take_block(Py_buffer *view, PyObject *object, int access, char *format);
verdict take_view(Py_buffer *view, PyObject *object, int access, char *format);
verdict take(arrays *taken, PyObject *object, int access);

PyObject *no_such_call(const char *usage);

/* Release what was taken; True, False, or NULL with the exception. */
PyObject *give_back(arrays *taken, verdict fit);

static inline Py_ssize_t bytes_of(const arrays *taken) { return taken->count * taken->views[0].len; }

#define SHORT_BYTES 16384 /* work of about a microsecond: another thread could keep the GIL for milliseconds */

#define WITHOUT_GIL(bytes, ...) \
    { \
        PyThreadState *thread = (bytes) > SHORT_BYTES ? PyEval_SaveThread() : NULL; \
        __VA_ARGS__ \
        if (thread) PyEval_RestoreThread(thread); \
    }

/* Made once, used every round. `Terms` has its parts, `Barrier` its board, for as long as they live. */
typedef struct {
    PyObject_HEAD
    shoal_terms terms;
    char format;
    Py_ssize_t held; /* views */
    Py_buffer *views;
    const void **parts;
    unsigned char *joins;
} Terms;

typedef struct {
    PyObject_HEAD
    int has_view;
    Py_buffer view;
    int64_t *board, *members;
    size_t count;
    int64_t me;
} Barrier;

/* layers.c */
PyObject *cpu_unfold(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_fold(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_max_pool(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_max_pool_gradient(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_mirror(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_moments(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_affine(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_masked(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_gradient_moments(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *cpu_affine_gradient(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* batches.c */
PyObject *cpu_gather(PyObject *self, PyObject *const *args, Py_ssize_t count);

extern PyType_Spec terms_spec, barrier_spec, meeting_spec;
int add_type(PyObject *module, PyType_Spec *spec, const char *name);

#endif
