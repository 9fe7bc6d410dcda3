/* Which file is mapped where, and a handler of SIGBUS that says which one could not be read before the process ends.

   A page of a mapped file that is not in the file any more, because it was cut short, or that its disk does not give, ends
   the process by SIGBUS. The handler only reads memory and calls what is safe in a handler: stat and write. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    uint64_t start, bytes, offset; /* address, length, and the offset in the file */
} Run;

typedef struct Mapped {
    struct Mapped *next;
    const char *path;
    int64_t count;
    Run runs[];
} Mapped;

/* Changed under the GIL. A fault while another thread takes an entry out may read it a moment too late: the process ends anyhow. */
static Mapped *volatile mapped = NULL;
static struct sigaction before;
static volatile sig_atomic_t installed = 0;

static char *put(char *at, const char *text) {
    size_t length = strlen(text);
    memcpy(at, text, length);
    return at + length;
}

static char *put_number(char *at, uint64_t number) {
    char digits[24];
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while (number /= 10);
    while (count)
        *at++ = digits[--count];
    return at;
}

static void say(const Mapped *file, uint64_t offset) {
    static char line[8192]; /* a path has at most 4096 bytes */
    struct stat now;
    char *at = put(line, "error: SIGBUS: byte ");
    at = put_number(at, offset);
    at = put(at, " of ");
    at = put(at, file->path);
    if (stat(file->path, &now) == 0 && (uint64_t)now.st_size <= offset) {
        at = put(at, " was needed, and the file has ");
        at = put_number(at, (uint64_t)now.st_size);
        at = put(at, " bytes now: it was cut short or overwritten while it was served. This process ends. Put the archive back; a new "
                     "version belongs in a folder of its own.\n");
    } else {
        at = put(at, " could not be read: the disk failed, or the file was replaced while it was served. This process ends. Look at the "
                     "archive with `recinfer verify`.\n");
    }
    ssize_t written = write(2, line, (size_t)(at - line));
    (void)written;
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    (void)context;
    uint64_t at = (uint64_t)(uintptr_t)info->si_addr;
    for (const Mapped *file = mapped; file && info->si_code > 0; file = file->next)
        for (int64_t i = 0; i < file->count; i++)
            if (at - file->runs[i].start < file->runs[i].bytes) {
                say(file, file->runs[i].offset + (at - file->runs[i].start));
                goto end;
            }
end:
    /* As without this handler: the signal is blocked here, and comes again at the return. */
    sigaction(SIGBUS, &before, NULL);
    raise(number);
}

static PyObject *install(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    if (!installed) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = on_sigbus;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        if (sigaction(SIGBUS, &action, &before))
            return PyErr_SetFromErrno(PyExc_OSError);
        installed = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *add(PyObject *self, PyObject *args) {
    (void)self;
    const char *path, *runs;
    Py_ssize_t path_bytes, runs_bytes;
    if (!PyArg_ParseTuple(args, "y#y#", &path, &path_bytes, &runs, &runs_bytes))
        return NULL;
    if (path_bytes > 4096 || runs_bytes % (Py_ssize_t)sizeof(Run))
        return PyErr_Format(PyExc_ValueError, "expected a path of at most 4096 bytes, and runs of three 64-bit numbers");
    Mapped *file = malloc(sizeof *file + (size_t)runs_bytes + (size_t)path_bytes + 1);
    if (!file)
        return PyErr_NoMemory();
    file->count = runs_bytes / (Py_ssize_t)sizeof(Run);
    memcpy(file->runs, runs, (size_t)runs_bytes);
    char *copy = (char *)(file->runs + file->count);
    memcpy(copy, path, (size_t)path_bytes);
    copy[path_bytes] = '\0';
    file->path = copy;
    file->next = mapped;
    mapped = file;
    return PyLong_FromVoidPtr(file);
}

static PyObject *drop(PyObject *self, PyObject *key) {
    (void)self;
    const Mapped *gone = PyLong_AsVoidPtr(key);
    if (PyErr_Occurred())
        return NULL;
    Mapped *last = NULL;
    for (Mapped *file = mapped; file; last = file, file = file->next)
        if (file == gone) {
            if (last)
                last->next = file->next;
            else
                mapped = file->next;
            free(file);
            break;
        }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS,
     "add(path, runs)\n\nNote that a file is mapped; returns what drop takes. runs: int64 [n, 3], address, bytes, offset in the file."},
    {"drop", drop, METH_O, "drop(key)\n\nForget what add noted."},
    {"install", install, METH_NOARGS, "install()\n\nHave SIGBUS say which mapped file it is about; once for the process."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_mapped", "Says which mapped file a SIGBUS is about.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__mapped(void) { return PyModuleDef_Init(&definition); }
