/* Arrays by the buffer protocol. */
#include "binding.h"

#include <string.h>

/* An array of any number of axes. `format` becomes 'f', 'd', 'e', 'B', 'H' or 'l' (64-bit integers of any name);
   anything else does not fit. */
verdict take_block(Py_buffer *view, PyObject *object, int access, char *format) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | access) < 0) {
        PyErr_Clear();
        return OTHER;
    }
    const char *name = view->format ? view->format : "B";
    *format = name[0];
    if (strchr("lLqQ", *format) && view->itemsize == 8) *format = 'l';
    if (name[0] && !name[1] && strchr("fdeBHl", *format)) return FITS;
    PyBuffer_Release(view);
    return OTHER;
}

/* The same of a flat array, without bytes. */
verdict take_view(Py_buffer *view, PyObject *object, int access, char *format) {
    verdict fit = take_block(view, object, access, format);
    if (fit != FITS || (view->ndim == 1 && *format != 'B')) return fit;
    PyBuffer_Release(view);
    return OTHER;
}

verdict take(arrays *taken, PyObject *object, int access) {
    Py_buffer *view = &taken->views[taken->count];
    char format;
    if (take_view(view, object, access, &format) != FITS) return OTHER;
    Py_ssize_t size = view->len / view->itemsize;
    if (!taken->count++) {
        taken->format = format;
        taken->size = size;
        return format == 'l' ? OTHER : FITS;
    }
    if (format != taken->format) return OTHER;
    if (size == taken->size) return FITS;
    PyErr_Format(PyExc_ValueError, "the arrays have %zd and %zd elements", taken->size, size);
    return WRONG;
}

PyObject *give_back(arrays *taken, verdict fit) {
    while (taken->count) PyBuffer_Release(&taken->views[--taken->count]);
    return fit == WRONG ? NULL : PyBool_FromLong(fit == FITS);
}

int add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (!type) return -1;
    int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed;
}
