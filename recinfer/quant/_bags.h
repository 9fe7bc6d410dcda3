/* Bags of ids as they lie in a message's bytes: how many each holds, and which. For the compiled loops here. */

#ifndef RECINFER_BAGS_H
#define RECINFER_BAGS_H

#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *lengths, *values; /* unsigned [keys, batch]; int64 or int32 [ids] */
    int64_t keys, ids, batch;
    int wide;         /* ids are int64 */
    int length_bytes; /* of a length: 4 or 1; 0: there are none, each bag holds one id */
} Bags;

static inline int64_t length_at(const Bags *bags, int64_t at) {
    if (bags->length_bytes == 4) {
        uint32_t length; /* a negative one becomes larger than any number of ids */
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

/* Where each key's ids begin, [keys + 1]; 0 where the lengths are not those of so many ids. */
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
