/*
 * Operator names, from the one list in ops.h. Called by the registry's sentences and by callers.
 */
#include "ops/ops.h"

const char *mla_op_name(int32_t op)
{
    switch (op) {
#define NAME(name, value, text)                                                                    \
    case name:                                                                                     \
        return text;
        MLA_OP_LIST(NAME)
#undef NAME
    default:
        return "unknown";
    }
}

int32_t mla_op_from_name(const char *name)
{
    if (name == NULL)
        return MLA_OP_NONE;
#define MATCH(op, value, text)                                                                     \
    if (strcmp(name, text) == 0)                                                                   \
        return op;
    MLA_OP_LIST(MATCH)
#undef MATCH
    return MLA_OP_NONE;
}
