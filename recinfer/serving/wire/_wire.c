/* Where the parts of a small LookupRequest or PredictRequest lie in its bytes, for those that need nothing special.

   Whatever is unusual, malformed or optional (weights, raw rows, fields in pieces, a context of several samples) gives None: then the protobuf
   runtime reads the message, and its errors are the caller's. So nothing is refused here. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "_reader.h"

typedef struct {
    Span keys; /* the fields of all keys, tags and all */
    Span lengths, values, values_int32;
    uint64_t batch;
    Py_ssize_t num_keys;
} Features;

static int once(Span *target, Span span) {
    if (target->at != NULL)
        return 0;
    *target = span;
    return 1;
}

static int read_features(Span message, Features *features) {
    Reader reader = {message.at, message.at + message.size};
    int has_batch = 0;
    while (reader.at < reader.end) {
        const uint8_t *begin = reader.at;
        uint64_t tag;
        Span span;
        if (!read_varint(&reader, &tag))
            return 0;
        if (tag == (2 << 3 | VARINT)) {
            if (has_batch || !read_varint(&reader, &features->batch))
                return 0;
            has_batch = 1;
            continue;
        }
        if ((tag & 7) != DELIMITED || !read_span(&reader, &span))
            return 0;
        switch (tag >> 3) {
        case 1:
            if (features->num_keys == 0)
                features->keys.at = begin;
            else if (features->keys.at + features->keys.size != begin)
                return 0;
            features->keys.size = reader.at - features->keys.at;
            features->num_keys++;
            break;
        case 3:
            if (!once(&features->lengths, span))
                return 0;
            break;
        case 4:
            if (!once(&features->values, span))
                return 0;
            break;
        case 6:
            if (!once(&features->values_int32, span))
                return 0;
            break;
        default:
            return 0;
        }
    }
    return has_batch && features->num_keys && features->batch >= 1 && features->batch <= INT32_MAX;
}

/* Whether it holds as many lengths as it has bags, and ids of one width. */
static int is_whole(const Features *features) {
    const Span *ids = features->values_int32.size ? &features->values_int32 : &features->values;
    if (features->values.size && features->values_int32.size)
        return 0;
    return ids->size % (features->values_int32.size ? 4 : 8) == 0 &&
           (uint64_t)features->lengths.size == 4 * features->batch * (uint64_t)features->num_keys;
}

static int read_request(const uint8_t *data, Py_ssize_t size, Span *model, Span *version, Span *dense,
                        Features *features, Features *context) {
    Reader reader = {data, data + size};
    Span message = {NULL, 0}, beside = {NULL, 0};
    while (reader.at < reader.end) {
        uint64_t tag;
        Span span, *target;
        if (!read_varint(&reader, &tag) || (tag & 7) != DELIMITED || !read_span(&reader, &span))
            return 0;
        switch (tag >> 3) {
        case 1:
            target = model;
            break;
        case 2:
            target = version;
            break;
        case 3:
            target = &message;
            break;
        case 4:
            target = dense;
            break;
        case 5:
            target = &beside;
            break;
        default:
            return 0;
        }
        if (!once(target, span))
            return 0;
    }
    if (message.at == NULL || !read_features(message, features) || !is_whole(features))
        return 0;
    return beside.at == NULL || (read_features(beside, context) && context->batch == 1 && is_whole(context));
}

/* The bytes of the keys, and a recinfer.quant.bags.BagPlaces without its name. */
static PyObject *places_of(const Features *features, const uint8_t *bytes) {
    const int wide = features->values_int32.size == 0;
    const Span *ids = wide ? &features->values : &features->values_int32;
    return Py_BuildValue("y#(nnnOnn)", (const char *)features->keys.at, features->keys.size, features->lengths.at - bytes,
                         ids->at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(ids->at - bytes), ids->size / (wide ? 8 : 4),
                         wide ? Py_True : Py_False, features->num_keys, (Py_ssize_t)features->batch);
}

PyDoc_STRVAR(read_doc,
             "read_request(data)\n--\n\n"
             "(model, version, dense at, bytes of dense, features, context) of a serialized LookupRequest or PredictRequest;\n"
             "None for one that is not of the plain kind. features and context, which is None where there is none: (bytes of the\n"
             "keys, the fields of a recinfer.quant.bags.BagPlaces). Places are offsets in `data`. What the ids are, nobody has\n"
             "looked at. A LookupRequest knows no context.");

static PyObject *read_method(PyObject *module, PyObject *data) {
    (void)module;
    if (!PyBytes_Check(data)) {
        PyErr_SetString(PyExc_TypeError, "read_request: expected bytes");
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AsString(data);
    Span model = {NULL, 0}, version = {NULL, 0}, dense = {NULL, 0};
    Features features = {0}, context = {0};
    if (!read_request(bytes, PyBytes_Size(data), &model, &version, &dense, &features, &context))
        Py_RETURN_NONE;
    PyObject *places = places_of(&features, bytes), *beside = Py_None;
    if (context.num_keys)
        beside = places_of(&context, bytes);
    else
        Py_INCREF(beside);
    if (places == NULL || beside == NULL) {
        Py_XDECREF(places);
        Py_XDECREF(beside);
        return NULL;
    }
    PyObject *found = Py_BuildValue(
        "s#s#nnNN", model.at == NULL ? "" : (const char *)model.at, model.size,
        version.at == NULL ? "" : (const char *)version.at, version.size,
        dense.at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(dense.at - bytes), dense.size, places, beside);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return found;
}

static PyMethodDef methods[] = {{"read_request", read_method, METH_O, read_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_wire", "Where the parts of a small request lie.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__wire(void) { return PyModuleDef_Init(&definition); }
