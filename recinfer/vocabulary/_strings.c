/* Strings of requests: the 64-bit key of each, rule V8 of recinfer/archive/FORMAT.md, and strings that each follow their length. */

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

/* Whether each string lies in `size` bytes; without `starts` they follow one another and fill it. */
static int fit(const int64_t *starts, Numbers lengths, Py_ssize_t n, int64_t size) {
    int64_t end = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int64_t length = number_at(lengths, i), start = starts ? starts[i] : end;
        if (length < 0 || start < 0 || start > size || length > size - start)
            return 0;
        end = start + length;
    }
    return starts != NULL || end == size;
}

static void write_keys(const uint8_t *data, const int64_t *starts, Numbers lengths, Py_ssize_t n, uint64_t low, uint64_t high,
                       uint64_t *out) {
    int64_t end = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int64_t length = number_at(lengths, i), start = starts ? starts[i] : end;
        out[i] = siphash(data + start, (uint64_t)length, low, high);
        end = start + length;
    }
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
    if ((sizes.width != 4 && sizes.width != 8) || lengths.len != n * sizes.width || out.len != 8 * n ||
        (first != NULL && starts.len != 8 * n) || !fit(first, sizes, n, data.len)) {
        PyErr_SetString(PyExc_ValueError, "keys: strings outside the bytes, or arrays of different lengths");
        goto close;
    }
    if (data.len + n > LONG_WORK) {
        Py_BEGIN_ALLOW_THREADS
        write_keys(data.buf, first, sizes, n, low, high, out.buf);
        Py_END_ALLOW_THREADS
    } else {
        write_keys(data.buf, first, sizes, n, low, high, out.buf);
    }
    result = Py_NewRef(Py_None);
close:;
    Py_buffer *all[] = {&data, &starts, &lengths, &out};
    for (int i = 0; i < 4; i++)
        if (all[i]->obj != NULL)
            PyBuffer_Release(all[i]);
    return result;
}

PyDoc_STRVAR(split_doc,
             "split(data, count)\n--\n\n"
             "The bytes of `count` strings, one after another, and the bytes of their lengths, int32 [count], from `data`, where each\n"
             "string follows its length of 4 bytes, little-endian. None if `data` is no such strings.");

/* Move the bytes and lengths of `count` strings from `data` to `to` and `sizes`; 0 if `data` is no such strings. */
static int take_apart(const char *data, Py_ssize_t left, Py_ssize_t count, char *to, char *sizes) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t length;
        const Py_ssize_t most = left - 4 * (count - i); /* 4 bytes are left for the length of each following string */
        if (most < 0)
            return 0;
        memcpy(&length, data, 4);
        if ((Py_ssize_t)length > most || length > INT32_MAX)
            return 0;
        memcpy(sizes + 4 * i, &length, 4);
        memcpy(to, data + 4, length);
        to += length;
        data += 4 + (Py_ssize_t)length;
        left -= 4 + (Py_ssize_t)length;
    }
    return left == 0;
}

static PyObject *split_method(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n", &data, &count))
        return NULL;
    PyObject *joined = NULL, *lengths = NULL, *result = NULL;
    if (count < 0 || count > data.len / 4) {
        result = Py_NewRef(Py_None);
    } else {
        joined = PyBytes_FromStringAndSize(NULL, data.len - 4 * count);
        lengths = PyBytes_FromStringAndSize(NULL, 4 * count);
        if (joined != NULL && lengths != NULL)
            result = take_apart(data.buf, data.len, count, PyBytes_AsString(joined), PyBytes_AsString(lengths))
                         ? PyTuple_Pack(2, joined, lengths)
                         : Py_NewRef(Py_None);
    }
    Py_XDECREF(joined);
    Py_XDECREF(lengths);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"keys", keys_method, METH_VARARGS, keys_doc}, {"split", split_method, METH_VARARGS, split_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_strings", "Keys of strings.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__strings(void) { return PyModuleDef_Init(&definition); }
