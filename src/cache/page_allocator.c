/*
 * Page ids 1..num_pages with reference counts, lowest free id first.
 *
 * Free pages are bits of 64-bit words; `first_word` is at or below the lowest word with a free bit,
 * so an allocation scans on from there. Low ids first keep the live part of a pool dense, and make
 * runs reproducible. Lists are checked by applying them and taking them back on an error: all or
 * nothing without scratch memory. Called by engines and by mla_req_to_page_reserve.
 */
#include "cache/cache.h"
#include <stdlib.h>

struct mla_page_allocator {
    int64_t num_pages;
    int64_t free_count;
    int64_t first_word;
    int64_t n_words;
    uint64_t *free_bits; /* bit id & 63 of word id >> 6 */
    int32_t *refs;       /* [num_pages + 1] */
};

mla_status mla_page_allocator_create(int64_t num_pages, mla_page_allocator **out, mla_diag *diag)
{
    if (out == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "out is NULL: give a place for the allocator");
    if (num_pages < 1 || num_pages > (int64_t)INT32_MAX - 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "num_pages %lld: 1 to %lld are possible",
                         (long long)num_pages, (long long)INT32_MAX - 1);
    mla_page_allocator *a = calloc(1, sizeof *a);
    if (a != NULL) {
        a->num_pages = a->free_count = num_pages;
        a->n_words = (num_pages >> 6) + 1;
        a->free_bits = calloc((size_t)a->n_words, sizeof *a->free_bits);
        a->refs = calloc((size_t)num_pages + 1, sizeof *a->refs);
    }
    if (a == NULL || a->free_bits == NULL || a->refs == NULL) {
        mla_page_allocator_destroy(a);
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for the counts of %lld pages",
                         (long long)num_pages);
    }
    for (int64_t id = 1; id <= num_pages; id++)
        a->free_bits[id >> 6] |= UINT64_C(1) << (id & 63);
    *out = a;
    return MLA_OK;
}

void mla_page_allocator_destroy(mla_page_allocator *allocator)
{
    if (allocator == NULL)
        return;
    free(allocator->free_bits);
    free(allocator->refs);
    free(allocator);
}

int64_t mla_page_allocator_free_count(const mla_page_allocator *allocator)
{
    return allocator == NULL ? 0 : allocator->free_count;
}

int64_t mlai_page_allocator_num_pages(const mla_page_allocator *allocator)
{
    return allocator->num_pages;
}

static mla_status check_list(const mla_page_allocator *allocator, int64_t n, const int32_t *ids,
                             mla_diag *diag)
{
    if (allocator == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "allocator is NULL: give one");
    if (n < 0 || (n > 0 && ids == NULL))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "n is %lld and ids is %s: give n >= 0 ids",
                         (long long)n, ids == NULL ? "NULL" : "set");
    return MLA_OK;
}

mla_status mla_page_allocator_alloc(mla_page_allocator *allocator, int64_t n, int32_t *ids,
                                    mla_diag *diag)
{
    MLAI_TRY(check_list(allocator, n, ids, diag));
    if (n > allocator->free_count)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_PAGES,
                         "%lld pages are wanted and %lld of %lld are free: release some or wait",
                         (long long)n, (long long)allocator->free_count,
                         (long long)allocator->num_pages);
    int64_t word = allocator->first_word;
    for (int64_t i = 0; i < n; i++) {
        while (allocator->free_bits[word] == 0)
            word++; /* ends: free_count says that a bit is set at or after first_word */
        uint64_t bits = allocator->free_bits[word];
        int32_t id = (int32_t)(word * 64 + __builtin_ctzll(bits));
        allocator->free_bits[word] = bits & (bits - 1);
        allocator->refs[id] = 1;
        ids[i] = id;
    }
    allocator->first_word = word;
    allocator->free_count -= n;
    return MLA_OK;
}

mla_status mla_page_allocator_retain(mla_page_allocator *allocator, int64_t n, const int32_t *ids,
                                     mla_diag *diag)
{
    MLAI_TRY(check_list(allocator, n, ids, diag));
    for (int64_t i = 0; i < n; i++) {
        int32_t refs = mla_page_allocator_ref_count(allocator, ids[i]);
        if (refs > 0 && refs < INT32_MAX) {
            allocator->refs[ids[i]]++;
            continue;
        }
        for (int64_t j = 0; j < i; j++)
            allocator->refs[ids[j]]--;
        if (refs < 0)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT, "ids[%lld] is %d: pages are 1 to %lld",
                             (long long)i, ids[i], (long long)allocator->num_pages);
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "ids[%lld] is page %d, which %s", (long long)i,
                         ids[i],
                         refs == 0 ? "is free: only a page in use can be shared"
                                   : "has as many references as can be counted");
    }
    return MLA_OK;
}

mla_status mla_page_allocator_release(mla_page_allocator *allocator, int64_t n, const int32_t *ids,
                                      mla_diag *diag)
{
    MLAI_TRY(check_list(allocator, n, ids, diag));
    for (int64_t i = 0; i < n; i++) {
        int32_t refs = mla_page_allocator_ref_count(allocator, ids[i]);
        if (refs > 0) {
            allocator->refs[ids[i]]--;
            continue;
        }
        for (int64_t j = 0; j < i; j++)
            allocator->refs[ids[j]]++;
        if (refs < 0)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT, "ids[%lld] is %d: pages are 1 to %lld",
                             (long long)i, ids[i], (long long)allocator->num_pages);
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "ids[%lld] is page %d, which is free or listed more often than it has "
                         "references",
                         (long long)i, ids[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t word = ids[i] >> 6;
        uint64_t bit = UINT64_C(1) << (ids[i] & 63);
        if (allocator->refs[ids[i]] > 0 || (allocator->free_bits[word] & bit) != 0)
            continue; /* still used, or freed by an earlier entry of this list */
        allocator->free_bits[word] |= bit;
        allocator->free_count++;
        allocator->first_word = mlai_min_i64(allocator->first_word, word);
    }
    return MLA_OK;
}

int32_t mla_page_allocator_ref_count(const mla_page_allocator *allocator, int32_t id)
{
    if (allocator == NULL || id < 1 || id > allocator->num_pages)
        return -1;
    return allocator->refs[id];
}
