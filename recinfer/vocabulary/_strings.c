/* The 64-bit key of each string of a request, rule V8 of recinfer/archive/FORMAT.md. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LONG_WORK 65536 /* bytes and strings for which other Python threads run meanwhile */

static inline uint64_t turned(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t word_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

#define ROUND                                                                                                                          \
    do {                                                                                                                               \
        a += b;                                                                                                                        \
        c += d;                                                                                                                        \
        b = turned(b, 13) ^ a;                                                                                                         \
        d = turned(d, 16) ^ c;                                                                                                         \
        a = turned(a, 32);                                                                                                             \
        c += b;                                                                                                                        \
        a += d;                                                                                                                        \
        b = turned(b, 17) ^ c;                                                                                                         \
        d = turned(d, 21) ^ a;                                                                                                         \
        c = turned(c, 32);                                                                                                             \
    } while (0)

/* SipHash-2-4 (Aumasson and Bernstein, 2012) with the key `low`, `high`, little-endian. */
static uint64_t siphash(const uint8_t *at, uint64_t size, uint64_t low, uint64_t high) {
    uint64_t a = low ^ 0x736f6d6570736575u, b = high ^ 0x646f72616e646f6du;
    uint64_t c = low ^ 0x6c7967656e657261u, d = high ^ 0x7465646279746573u;
    const uint8_t *const end = at + (size & ~(uint64_t)7);
    for (; at < end; at += 8) {
        const uint64_t word = word_at(at);
        d ^= word;
        ROUND;
        ROUND;
        a ^= word;
    }
    uint64_t last = size << 56;
    for (uint64_t i = 0; i < (size & 7); i++)
        last |= (uint64_t)at[i] << 8 * i;
    d ^= last;
    ROUND;
    ROUND;
    a ^= last;
    c ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    ROUND;
    return a ^ b ^ c ^ d;
}

/* Numbers of 4 or 8 bytes. */
typedef struct {
    const uint8_t *at;
    Py_ssize_t width;
} Numbers;

static inline int64_t number_at(Numbers numbers, Py_ssize_t i) {
    if (numbers.width == 8)
        return (int64_t)word_at(numbers.at + 8 * i);
    int32_t number;
    memcpy(&number, numbers.at + 4 * i, 4);
    return number;
}

/* Write the key of each string; 0 if one is not in `size` bytes, or if strings without `starts`, which follow one another, do not fill
   them. Each number is read once: another thread may change it. */
static int write_keys(const uint8_t *data, int64_t size, const int64_t *starts, Numbers lengths, Py_ssize_t n, uint64_t low, uint64_t high,
                      uint64_t *out) {
    int64_t end = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int64_t length = number_at(lengths, i), start = starts ? starts[i] : end;
        if (length < 0 || start < 0 || start > size || length > size - start)
            return 0;
        out[i] = siphash(data + start, (uint64_t)length, low, high);
        end = start + length;
    }
    return starts != NULL || end == size;
}

PyDoc_STRVAR(keys_doc,
             "keys(data, starts, lengths, low, high, out)\n--\n\n"
             "Write the SipHash-2-4 of each string of the bytes `data` to `out`, int64 [N]. starts: int64 [N], first byte of each;\n"
             "None: the strings follow one another and fill `data`. lengths: int32 or int64 [N], in bytes. low, high: the key, as two\n"
             "64-bit numbers. ValueError for strings outside `data`.");

static PyObject *keys_method(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *data_object, *starts_object, *lengths_object, *out_object, *result = NULL;
    unsigned long long low, high;
    Py_buffer data = {0}, starts = {0}, lengths = {0}, out = {0};
    if (!PyArg_ParseTuple(args, "OOOKKO", &data_object, &starts_object, &lengths_object, &low, &high, &out_object) ||
        PyObject_GetBuffer(data_object, &data, PyBUF_SIMPLE) < 0 ||
        (starts_object != Py_None && PyObject_GetBuffer(starts_object, &starts, PyBUF_SIMPLE) < 0) ||
        PyObject_GetBuffer(lengths_object, &lengths, PyBUF_ND) < 0 || PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0)
        goto close;
    const Py_ssize_t n = out.len / 8;
    const Numbers sizes = {lengths.buf, lengths.itemsize};
    const int64_t *first = starts_object == Py_None ? NULL : starts.buf;
    int fit = (sizes.width == 4 || sizes.width == 8) && lengths.len == n * sizes.width && out.len == 8 * n &&
              (first == NULL || starts.len == 8 * n);
    if (fit && data.len + n > LONG_WORK) {
        Py_BEGIN_ALLOW_THREADS
        fit = write_keys(data.buf, data.len, first, sizes, n, low, high, out.buf);
        Py_END_ALLOW_THREADS
    } else if (fit) {
        fit = write_keys(data.buf, data.len, first, sizes, n, low, high, out.buf);
    }
    if (fit)
        result = Py_NewRef(Py_None);
    else
        PyErr_SetString(PyExc_ValueError, "keys: strings outside the bytes, or arrays of different lengths");
close:;
    Py_buffer *all[] = {&data, &starts, &lengths, &out};
    for (int i = 0; i < 4; i++)
        if (all[i]->obj != NULL)
            PyBuffer_Release(all[i]);
    return result;
}

static PyMethodDef methods[] = {{"keys", keys_method, METH_VARARGS, keys_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_strings", "Keys of strings.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__strings(void) { return PyModuleDef_Init(&definition); }
