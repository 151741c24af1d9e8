"""A launch in C: what takes Python more than a microsecond for each kernel takes a tenth of that.

Triton needs a C compiler to launch anything, so there is one, or was one when its cache was filled:
the code below is compiled and kept as Triton does with its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import lru_cache

Launch = Callable[..., None]
"""Takes a plan (`driver.plan_of`), a stream, and as many addresses as the plan has places for."""

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* CUlaunchConfig is 7 words, and the stream is the fifth. */
enum { MOST_BYTES = 4096, MOST_PARAMETERS = 256, CONFIG_WORDS = 7, STREAM = 4 };

struct plan {
    int (*launch)(const uint64_t *config, void *function, void **parameters, void **extra);
    int (*get_context)(void **context);
    int (*retain_context)(void **context, int device);
    int (*set_context)(void *context);
    int (*get_error_string)(int result, const char **text);
    uint64_t device;
    void *function;
    uint64_t config[CONFIG_WORDS];
    uint64_t n_parameters, n_addresses, n_bytes;
    /* Then the places in memory of parameters, and of addresses; then the memory. */
};

/* A thread that has not used CUDA yet has no context: it gets the one that torch has. */
static int enter_context(const struct plan *plan)
{
    void *context = NULL;
    int result = plan->get_context(&context);
    if (result || context)
        return result;
    result = plan->retain_context(&context, (int)plan->device);
    return result ? result : plan->set_context(context);
}

/* launch(plan: bytes, stream: int, *addresses: int): writes addresses into a copy of the plan's
   memory, and launches with parameters at their places in it. */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    _Alignas(64) char memory[MOST_BYTES];
    void *parameters[MOST_PARAMETERS];
    struct plan plan;
    if (n < 2 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) < (Py_ssize_t)sizeof plan)
        return PyErr_Format(PyExc_TypeError, "launch takes a plan, a stream and addresses");
    memcpy(&plan, PyBytes_AS_STRING(args[0]), sizeof plan);
    if (plan.n_bytes > MOST_BYTES || plan.n_parameters > MOST_PARAMETERS)
        return PyErr_Format(PyExc_ValueError, "launch takes a plan with fewer parameters");
    if ((uint64_t)n != 2 + plan.n_addresses)
        return PyErr_Format(PyExc_TypeError, "launch takes the addresses of its plan");
    const char *places = PyBytes_AS_STRING(args[0]) + sizeof plan;
    memcpy(memory, places + 8 * (plan.n_parameters + plan.n_addresses), plan.n_bytes);
    uint64_t place;
    for (uint64_t i = 0; i < plan.n_parameters; ++i, places += sizeof place) {
        memcpy(&place, places, sizeof place);
        parameters[i] = memory + place;
    }
    for (uint64_t i = 0; i < plan.n_addresses; ++i, places += sizeof place) {
        uint64_t address = PyLong_AsUnsignedLongLong(args[2 + i]);
        memcpy(&place, places, sizeof place);
        memcpy(memory + place, &address, sizeof address);
    }
    plan.config[STREAM] = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = enter_context(&plan);
    if (!result)
        result = plan.launch(plan.config, plan.function, parameters, NULL);
    Py_END_ALLOW_THREADS
    if (result) {
        const char *text = NULL;
        plan.get_error_string(result, &text);
        text = text ? text : "unknown";
        return PyErr_Format(PyExc_RuntimeError, "CUDA error %d: %s", result, text);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "lockstep_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_lockstep_launch(void) { return PyModule_Create(&module); }
"""


@lru_cache(maxsize=1)
def find_launch() -> Launch | None:
    """`launch` of the code above; None where it cannot be compiled."""
    from triton.runtime.build import compile_module_from_src

    try:
        launch: Launch = compile_module_from_src(_SOURCE, "lockstep_launch").launch
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError):
        return None
    return launch
