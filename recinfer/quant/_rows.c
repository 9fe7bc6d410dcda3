/* Float rows to packed integer rows and the error this makes, in one pass over each row while it is in the cache.

   The arithmetic is that of recinfer/quant/formats/integers.py and of FBGEMM's quantizer, bit for bit. Other threads of
   the process run meanwhile: the interpreter lock is released for the whole call. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_half.h"
#include "_row.h"

typedef struct {
    double weight_squares; /* sum of squares of all weights: NaN or infinite if a weight is */
    double squares;        /* sum of squares of all differences */
    float largest;         /* difference, in and out */
    float step;            /* the largest scale, in and out */
} Errors;

/* Floats in the order of these integers; -0.0 is below 0.0. */
static inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

/* Rows in flight: their minima, then their scales, then their codes, so that no row waits for another's divisions. */
#define GROUP 16

typedef struct {
    int32_t low[GROUP], high[GROUP]; /* in the order of integers */
    uint32_t half_bias[GROUP], half_scale[GROUP];
    float bias[GROUP], scale[GROUP], inverse[GROUP];
    float weight_squares[GROUP], squares[GROUP], furthest[GROUP]; /* furthest: in units of the scale */
} Group;

static inline void find_ranges(const float *weights, int rows, Py_ssize_t dim, Group *group) {
    for (int r = 0; r < rows; r++) {
        const float *row = weights + r * dim;
        int32_t low = INT32_MAX, high = INT32_MIN;
        float squares = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : squares)
        for (Py_ssize_t i = 0; i < dim; i++) {
            int32_t word = ordered((int32_t)to_bits(row[i]));
            low = word < low ? word : low;
            high = word > high ? word : high;
            squares += row[i] * row[i];
        }
        group->low[r] = low;
        group->high[r] = high;
        group->weight_squares[r] = squares;
    }
}

static inline void find_scales(float levels, Group *group) {
    for (int r = 0; r < GROUP; r++) {
        float low = from_bits((uint32_t)ordered(group->low[r])), high = from_bits((uint32_t)ordered(group->high[r]));
        uint32_t half_bias = to_half(low);
        float bias = from_half(half_bias), range = high - bias;
        uint32_t half_scale = to_half(range == 0.0f ? 1.0f : range / levels);
        half_scale = (half_scale & 0x7fffu) == 0 ? 0x3c00u : half_scale; /* 1 if the range is too small for fp16 */
        float scale = from_half(half_scale);
        group->half_bias[r] = half_bias;
        group->half_scale[r] = half_scale;
        group->bias[r] = bias;
        group->scale[r] = scale;
        group->inverse[r] = 1.0f / scale;
    }
}

/* `codes`: a byte each. `wide`: scratch [dim]; a loop of one width of numbers is one that compilers make good vectors of. */
static inline void find_codes(const float *row, Py_ssize_t dim, float levels, uint8_t *restrict codes,
                              int32_t *restrict wide, int r, Group *group) {
    const float bias = group->bias[r], inverse = group->inverse[r];
    float squares = 0.0f, furthest = 0.0f;
#pragma omp simd reduction(+ : squares) reduction(max : furthest)
    for (Py_ssize_t i = 0; i < dim; i++) {
        float exact = (row[i] - bias) * inverse;
        float code = rintf(exact);
        code = code > 0.0f ? code : 0.0f;
        code = code < levels ? code : levels;
        wide[i] = (int32_t)code;
        float off = fabsf(code - exact);
        furthest = off > furthest ? off : furthest;
        squares += off * off;
    }
    for (Py_ssize_t i = 0; i < dim; i++)
        codes[i] = (uint8_t)wide[i];
    group->squares[r] = squares;
    group->furthest[r] = furthest;
}

/* Codes of less than a byte, low bits first; reads up to three bytes of zeros behind the last code. */
static inline void join_codes(uint8_t *codes, Py_ssize_t dim, int bits, uint8_t *out) {
    memset(codes + dim, 0, 3);
    if (bits == 4)
        for (Py_ssize_t i = 0; i < (dim + 1) / 2; i++)
            out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    else
        for (Py_ssize_t i = 0; i < (dim + 3) / 4; i++)
            out[i] = (uint8_t)(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6);
}

/* Packs rows of `dim` floats; the numbers of rows whose minimum is -0.0 go to `odd`, and how many there are is returned:
   which of the zeros FBGEMM takes for their bias, it alone knows. `scratch`: dim + 3 bytes, `wide`: dim numbers. */
WIDE static Py_ssize_t pack(const float *weights, Py_ssize_t rows, Py_ssize_t dim, int bits, uint8_t *out,
                            Py_ssize_t stride, uint8_t *scratch, int32_t *wide, int32_t *odd, Errors *errors) {
    const float levels = (float)((1 << bits) - 1);
    Py_ssize_t found = 0;
    Group group;
    memset(&group, 0, sizeof group);
    for (Py_ssize_t first = 0; first < rows; first += GROUP) {
        const int count = rows - first < GROUP ? (int)(rows - first) : GROUP;
        find_ranges(weights + first * dim, count, dim, &group);
        find_scales(levels, &group);
        for (int r = 0; r < count; r++) {
            const float *row = weights + (first + r) * dim;
            uint8_t *packed = out + (first + r) * stride;
            uint8_t *codes = bits == 8 ? packed + QPARAM_BYTES : scratch;
            find_codes(row, dim, levels, codes, wide, r, &group);
            const uint32_t lead = group.half_scale[r] | group.half_bias[r] << 16;
            memcpy(packed, &lead, QPARAM_BYTES);
            if (bits != 8)
                join_codes(codes, dim, bits, packed + QPARAM_BYTES);
            const float scale = group.scale[r], bias = group.bias[r];
            /* The difference as a reader sees it, with scale * code + bias rounded: only of rows that can be furthest. */
            if (group.furthest[r] * scale + fabsf(bias) * 0x1p-22f > errors->largest)
                for (Py_ssize_t i = 0; i < dim; i++) {
                    float off = fabsf((scale * (float)codes[i] + bias) - row[i]);
                    errors->largest = off > errors->largest ? off : errors->largest;
                }
        }
        for (int r = 0; r < count; r++) {
            const float scale = group.scale[r];
            errors->weight_squares += group.weight_squares[r];
            errors->squares += (double)group.squares[r] * scale * scale;
            errors->step = scale > errors->step ? scale : errors->step;
            if (group.low[r] == -1) /* -0.0 */
                odd[found++] = (int32_t)(first + r);
        }
    }
    return found;
}

PyDoc_STRVAR(pack_doc,
             "pack_rows(weights, out, format, odd, largest, step)\n--\n\n"
             "Quantize float32 rows [R, D] (C-contiguous) into uint8 rows [R, >= row bytes] (bytes of a row adjacent).\n\n"
             "Returns (rows whose minimum is -0.0, their numbers in the int32 array odd [>= R]; sum of squared weights;\n"
             "of squared differences; largest difference; largest scale). Weights that are not finite make the second\n"
             "not finite, and rows of no meaning. Raises ValueError for arrays of another shape.");

static PyObject *pack_rows(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *weights_object, *out_object, *odd_object, *result = NULL;
    int format;
    Errors errors = {0};
    if (!PyArg_ParseTuple(args, "OOiOff", &weights_object, &out_object, &format, &odd_object, &errors.largest,
                          &errors.step))
        return NULL;
    Py_buffer weights, out, odd;
    if (PyObject_GetBuffer(weights_object, &weights, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_STRIDES | PyBUF_WRITABLE) < 0)
        goto release_weights;
    if (PyObject_GetBuffer(odd_object, &odd, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        goto release_out;
    const Py_ssize_t rows = weights.ndim == 2 ? weights.shape[0] : -1, dim = rows < 0 ? 0 : weights.shape[1];
    if (rows < 0 || weights.itemsize != 4 || !code_bits(format) || dim < 1 || rows > INT32_MAX ||
        out.ndim != 2 || out.itemsize != 1 || out.shape[0] != rows || (out.strides[1] != 1 && out.shape[1] != 1) ||
        out.shape[1] < row_size(dim, format) || (rows > 1 && out.strides[0] < out.shape[1]) ||
        odd.itemsize != 4 || odd.len < 4 * rows) {
        PyErr_SetString(PyExc_ValueError, "expected float32 [R, D], uint8 [R, row bytes], an integer format, int32 [R]");
        goto release_odd;
    }
    int32_t *wide = PyMem_Malloc(5 * (size_t)dim + 4); /* numbers of 4 bytes, then of 1 */
    if (wide == NULL) {
        PyErr_NoMemory();
        goto release_odd;
    }
    Py_ssize_t found;
    Py_BEGIN_ALLOW_THREADS
    found = pack(weights.buf, rows, dim, code_bits(format), out.buf, out.strides[0], (uint8_t *)(wide + dim), wide, odd.buf,
                 &errors);
    Py_END_ALLOW_THREADS
    PyMem_Free(wide);
    result = Py_BuildValue("ndddd", found, errors.weight_squares, errors.squares, (double)errors.largest,
                           (double)errors.step);
release_odd:
    PyBuffer_Release(&odd);
release_out:
    PyBuffer_Release(&out);
release_weights:
    PyBuffer_Release(&weights);
    return result;
}

static PyMethodDef methods[] = {{"pack_rows", pack_rows, METH_VARARGS, pack_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", "Float rows to packed integer rows, with the error this makes.", 0, methods, slots,
    NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModuleDef_Init(&definition); }
