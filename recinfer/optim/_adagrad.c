/* One step of row-wise Adagrad on the rows of a lookup, single-threaded.

   FBGEMM's kernel for this changes between SSE and AVX instructions in its loop over rows. On an Intel Sapphire Rapids
   these changes cost about 0.5 microseconds a row: 640 nanoseconds an id in all, and 150 here. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 8 /* rows that are prefetched before their turn */
#define DIGIT 11
#define DIGITS (1 << DIGIT)

typedef struct {
    const float *gradient;
    float scale;
} Source;

/* Sort keys (row << 32 | number) by row; `other` has the same size. Returns where the sorted keys are. */
static uint64_t *sorted(uint64_t *keys, uint64_t *other, int64_t n, int64_t rows) {
    for (int shift = 32; shift < 64 && (rows - 1) >> (shift - 32); shift += DIGIT) {
        int64_t at[DIGITS + 1] = {0};
        for (int64_t i = 0; i < n; i++)
            at[((keys[i] >> shift) & (DIGITS - 1)) + 1]++;
        for (int d = 0; d < DIGITS; d++)
            at[d + 1] += at[d];
        for (int64_t i = 0; i < n; i++)
            other[at[(keys[i] >> shift) & (DIGITS - 1)]++] = keys[i];
        uint64_t *swapped = keys;
        keys = other;
        other = swapped;
    }
    return keys;
}

/* Step the rows of one table; keys are sorted. */
static void step(float *weights, float *momentum, int64_t dim, const uint64_t *keys, int64_t n, const Source *sources,
                 float *restrict sum, float rate, float eps) {
    for (int64_t i = 0; i < n;) {
        const uint64_t row = keys[i] >> 32;
        memset(sum, 0, sizeof(float) * (size_t)dim);
        for (; i < n && keys[i] >> 32 == row; i++) {
            if (i + AHEAD < n) {
                const uint64_t next = keys[i + AHEAD] >> 32;
                const char *of_row = (const char *)(weights + next * (uint64_t)dim);
                const char *of_source = (const char *)sources[(uint32_t)keys[i + AHEAD]].gradient;
                __builtin_prefetch(momentum + next, 1);
                for (int64_t byte = 0; byte < 4 * dim; byte += 64) {
                    __builtin_prefetch(of_row + byte, 1);
                    __builtin_prefetch(of_source + byte, 0);
                }
            }
            const Source source = sources[(uint32_t)keys[i]];
#pragma omp simd
            for (int64_t d = 0; d < dim; d++)
                sum[d] += source.scale * source.gradient[d];
        }
        float squares = 0.0f, *restrict own = weights + row * (uint64_t)dim;
#pragma omp simd reduction(+ : squares)
        for (int64_t d = 0; d < dim; d++)
            squares += sum[d] * sum[d];
        momentum[row] += squares / (float)dim;
        const float factor = rate / (sqrtf(momentum[row]) + eps);
#pragma omp simd
        for (int64_t d = 0; d < dim; d++)
            own[d] -= factor * sum[d];
    }
}

PyDoc_STRVAR(step_doc,
             "step_table(weights, momentum, rows, dim, gradients, stride, columns, ids, num_ids, offsets, wide, bags,\n"
             "           pooling, scales, rate, eps)\n--\n\n"
             "Step the rows of one table, in place. Arguments but columns, rate and eps are integers; those of arrays are\n"
             "addresses: weights float32 [rows, dim], momentum float32 [rows], gradients float32 of stride numbers a bag\n"
             "(an id with pooling 2); ids [num_ids] and offsets [features * bags + 1] int64 if wide, else int32; scales\n"
             "float32 of all ids, or 0. columns: of each feature, its first column of gradients. pooling: 0 sums, 1 means, 2 none.\n"
             "Raises IndexError for an id outside the table, for offsets that fall and for offsets that end outside of the\n"
             "ids, before any row is changed.");

static PyObject *step_table(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long weights, momentum, gradients, ids, offsets, scales;
    long long rows, dim, stride, num_ids, bags;
    int wide, pooling;
    float rate, eps;
    PyObject *columns;
    if (!PyArg_ParseTuple(args, "KKLLKLOKLKiLiKff", &weights, &momentum, &rows, &dim, &gradients, &stride, &columns, &ids,
                          &num_ids, &offsets, &wide, &bags, &pooling, &scales, &rate, &eps))
        return NULL;
    const Py_ssize_t features = PyTuple_Size(columns);
    if (features < 0)
        return NULL;
#define AT(array, i) (wide ? ((const int64_t *)(uintptr_t)(array))[i] : ((const int32_t *)(uintptr_t)(array))[i])
    for (int64_t bag = 0; bag < features * bags; bag++)
        if (AT(offsets, bag) > AT(offsets, bag + 1))
            return PyErr_Format(PyExc_IndexError, "offsets fall after bag %lld: a length is negative", (long long)bag);
    const int64_t first = AT(offsets, 0), last = AT(offsets, features * bags), n = last - first;
    if (first < 0 || last > num_ids || n > UINT32_MAX) /* a sort key has 32 bits for the number of an id */
        return PyErr_Format(PyExc_IndexError, "offsets from %lld to %lld are not within %lld ids", (long long)first,
                            (long long)last, num_ids);
    char *memory = PyMem_Malloc((size_t)n * (2 * sizeof(uint64_t) + sizeof(Source)) + sizeof(float) * (size_t)dim + 1);
    if (memory == NULL)
        return PyErr_NoMemory();
    Source *sources = (Source *)memory;
    uint64_t *keys = (uint64_t *)(sources + n);
    float *sum = (float *)(keys + 2 * n);
    int64_t outside = -1, number = 0;
    for (Py_ssize_t f = 0; f < features; f++) {
        const int64_t column = PyLong_AsLongLong(PyTuple_GetItem(columns, f));
        for (int64_t b = 0; b < bags; b++) {
            const int64_t start = AT(offsets, f * bags + b), stop = AT(offsets, f * bags + b + 1);
            const float share = pooling == 1 ? 1.0f / (float)(stop - start) : 1.0f;
            for (int64_t i = start; i < stop; i++, number++) {
                const int64_t id = AT(ids, i);
                if (id < 0 || id >= rows)
                    outside = i;
                const float scale = scales ? share * ((const float *)(uintptr_t)scales)[i] : share;
                const float *gradient = (const float *)(uintptr_t)gradients + (pooling == 2 ? i : b) * stride + column;
                sources[number] = (Source){gradient, scale};
                keys[number] = (uint64_t)id << 32 | (uint64_t)number;
            }
        }
    }
    if (outside >= 0) {
        PyErr_Format(PyExc_IndexError, "id %lld at %lld is outside a table of %lld rows", (long long)AT(ids, outside),
                     (long long)outside, rows);
    } else {
        Py_BEGIN_ALLOW_THREADS
        const uint64_t *order = sorted(keys, keys + n, n, rows);
        step((float *)(uintptr_t)weights, (float *)(uintptr_t)momentum, dim, order, n, sources, sum, rate, eps);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(memory);
    return outside >= 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {{"step_table", step_table, METH_VARARGS, step_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_adagrad", "One step of row-wise Adagrad on the rows of a lookup.", 0, methods, slots, NULL,
    NULL, NULL};

PyMODINIT_FUNC PyInit__adagrad(void) { return PyModuleDef_Init(&definition); }
