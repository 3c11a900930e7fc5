/*
 * libmla: Multi-head Latent Attention for LLM inference engines, behind one C ABI.
 *
 * Read in this order: version.h, status.h, tensor.h, context.h, ops.h, cache.h, backend.h. Kernel
 * authors also read solution.h. examples/decode.c is the shortest whole program.
 */
#ifndef MLA_MLA_H
#define MLA_MLA_H

#include <mla/backend.h>
#include <mla/cache.h>
#include <mla/context.h>
#include <mla/ops.h>
#include <mla/solution.h>
#include <mla/status.h>
#include <mla/tensor.h>
#include <mla/version.h>

#endif
