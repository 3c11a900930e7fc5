/*
 * Backends by name: the built-in "mla" and whatever rows a caller brings. No global table: the
 * caller's array is the registry, so two engines in a process do not see each other's rows.
 *
 * Lookup: the caller's rows from the last to the first, then the built-in one; the first of that
 * name decides. Called by engines at start-up.
 */
#include "backend/backend.h"

static mla_status create_mla(mla_context *ctx, const mla_config *config, void **backend,
                             mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give a place for it");
    mla_backend *own = NULL;
    MLAI_TRY(mla_backend_create(ctx, config, &own, diag));
    *backend = own;
    return MLA_OK;
}

static void destroy_mla(void *backend)
{
    mla_backend_destroy(backend);
}

static const mla_backend_row builtin_row = {
    .name = "mla",
    .architectures = MLA_ARCH_MLA,
    .create = create_mla,
    .destroy = destroy_mla,
};

static const char *default_name(uint32_t architecture)
{
    switch (architecture) {
    case MLA_ARCH_MLA:
        return "mla";
    case MLA_ARCH_MHA:
        return "mha";
    case MLA_ARCH_DSA:
        return "dsa";
    default:
        return NULL;
    }
}

/* Names that serve the architecture, or all of them when architecture is 0. */
static void list_names(const mla_backend_row *rows, int32_t n_rows, uint32_t architecture,
                       char *text, size_t text_bytes)
{
    for (int32_t i = -1; i < n_rows; i++) {
        const mla_backend_row *row = i < 0 ? &builtin_row : &rows[i];
        if (row->name != NULL && (architecture == 0 || (row->architectures & architecture) != 0))
            mlai_append(text, text_bytes, "%s%s", text[0] != 0 ? ", " : "", row->name);
    }
    if (text[0] == 0)
        mlai_append(text, text_bytes, "none");
}

mla_status mla_backend_find(const mla_backend_row *rows, int32_t n_rows, const char *name,
                            uint32_t architecture, const mla_backend_row **out, mla_diag *diag)
{
    if (out == NULL || n_rows < 0 || (n_rows > 0 && rows == NULL))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "rows is %s, n_rows %d and out %s: give n_rows >= 0 rows and a place for "
                         "the result",
                         rows == NULL ? "NULL" : "set", n_rows, out == NULL ? "NULL" : "set");
    if (default_name(architecture) == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "architecture is %u: 1 (mla), 2 (mha) and 4 (dsa) exist", architecture);
    const char *wanted = name != NULL ? name : default_name(architecture);
    const mla_backend_row *found = NULL;
    for (int32_t i = n_rows - 1; i >= 0 && found == NULL; i--)
        if (rows[i].name != NULL && strcmp(rows[i].name, wanted) == 0)
            found = &rows[i];
    if (found == NULL && strcmp(builtin_row.name, wanted) == 0)
        found = &builtin_row;

    char names[256] = "";
    if (found == NULL) {
        list_names(rows, n_rows, 0, names, sizeof names);
        return mlai_fail(diag, MLA_ERROR_NOT_FOUND, "no backend is called \"%.80s\": there are %s",
                         wanted, names);
    }
    if ((found->architectures & architecture) == 0) {
        list_names(rows, n_rows, architecture, names, sizeof names);
        return mlai_fail(diag, MLA_ERROR_UNSUPPORTED,
                         "backend \"%.80s\" does not serve the %s architecture: these do: %s",
                         wanted, default_name(architecture), names);
    }
    *out = found;
    return MLA_OK;
}
