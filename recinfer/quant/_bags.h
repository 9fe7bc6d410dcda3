/* Bags of ids in a message's bytes: the number of ids of each bag, and the ids. For the compiled loops. */

#ifndef RECINFER_BAGS_H
#define RECINFER_BAGS_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *lengths, *values; /* unsigned [keys, batch]; int64 or int32 [ids] */
    int64_t keys, ids, batch;
    int wide;         /* ids are int64 */
    int length_bytes; /* bytes of a length: 4 or 1; 0: no lengths, each bag holds one id */
} Bags;

static inline int64_t length_at(const Bags *bags, int64_t at) {
    if (bags->length_bytes == 4) {
        uint32_t length; /* a negative length becomes larger than any number of ids */
        memcpy(&length, bags->lengths + 4 * at, 4);
        return length;
    }
    return bags->length_bytes ? bags->lengths[at] : 1;
}

static inline int64_t id_at(const Bags *bags, int64_t at) {
    if (bags->wide) {
        int64_t id;
        memcpy(&id, bags->values + 8 * at, 8);
        return id;
    }
    int32_t id;
    memcpy(&id, bags->values + 4 * at, 4);
    return id;
}

/* The bags that `places`, a recinfer.quant.bags.BagPlaces, says are in `data`; 0 with an error for what is not there. */
static inline int read_bags(PyObject *places, const uint8_t *data, Py_ssize_t size, int length_bytes, Bags *bags) {
    const Py_ssize_t most = PY_SSIZE_T_MAX / 64;
    Py_ssize_t lengths_at, ids_at, ids, keys, batch;
    int wide;
    if (!PyArg_ParseTuple(places, "nnnpnn", &lengths_at, &ids_at, &ids, &wide, &keys, &batch))
        return 0;
    if (keys < 0 || batch < 1 || ids < 0 || ids > most || (keys && batch > most / keys) ||
        (length_bytes != 0 && length_bytes != 1 && length_bytes != 4) || lengths_at < 0 || lengths_at > size ||
        length_bytes * keys * batch > size - lengths_at || ids_at < 0 || ids_at > size ||
        (wide ? 8 : 4) * ids > size - ids_at) {
        PyErr_SetString(PyExc_ValueError, "bags: places outside the bytes");
        return 0;
    }
    *bags = (Bags){data + lengths_at, data + ids_at, keys, ids, batch, wide, length_bytes};
    return 1;
}

/* The first id of each key, [keys + 1]; 0 if the sum of the lengths is not the number of ids. */
static inline int find_starts(const Bags *bags, int64_t *starts) {
    int64_t at = 0;
    for (int64_t key = 0; key < bags->keys; key++) {
        starts[key] = at;
        for (int64_t b = 0; b < bags->batch; b++) {
            at += length_at(bags, key * bags->batch + b);
            if (at > bags->ids)
                return 0;
        }
    }
    starts[bags->keys] = at;
    return at == bags->ids;
}

#endif
