/*
 * config.json: the two spellings give the same configuration, defaults are the architecture's, and
 * every contradiction is refused with a sentence that names the field.
 */
#include "support.h"
#include "test.h"

#include <config.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static mla_status parse(const char *text, mlai_model_config *config, mla_diag *diag)
{
    return mlai_model_config_parse(text, strlen(text), "config.json", config, diag);
}

static void test_shipped_configs(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    mlai_model_config c;
    mla_diag diag = {{0}};
    must(mlai_model_config_read(model_path("tiny/target", path), &c, &diag), &diag, path);
    assert_int_equal(c.family, MLAI_FAMILY_V3);
    assert_int_equal(c.q_lora_rank, 192);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos_token_ids[0], 257);
    assert_int_equal(c.rope.type, MLAI_ROPE_YARN);
    assert_true(c.rope.factor == 4.0 && c.rope.original_max_position == 1024.0);
    assert_true(c.rope.attention_factor == 1.0 && c.rope.mscale_all_dim == 1.0);
    assert_false(mlai_model_config_has_experts(&c, 0));
    assert_true(mlai_model_config_has_experts(&c, 1));
    must(mlai_model_config_read(model_path("tiny/draft", path), &c, &diag), &diag, path);
    assert_int_equal(c.q_lora_rank, 0);
    must(mlai_model_config_read(model_path("variants/v2_grouped", path), &c, &diag), &diag, path);
    assert_int_equal(c.family, MLAI_FAMILY_V2);
    assert_int_equal(c.topk_method, MLAI_TOPK_GROUP_LIMITED_GREEDY);
    assert_false(c.norm_topk_prob);
    must(mlai_model_config_read(model_path("variants/v3_yarn_vdim_differs", path), &c, &diag),
         &diag, path);
    assert_true(c.rope.type == MLAI_ROPE_YARN && c.rope.factor == 40.0);
    assert_int_equal(mlai_model_config_read("/nowhere", &c, &diag), MLA_ERROR_FILE);
}

static void test_two_spellings(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "{\"model_type\":\"deepseek_v3\",\"rope_theta\":50000,\"rope_scaling\":{\"type\":\"yarn\","
        "\"factor\":40,\"mscale\":0.707,\"mscale_all_dim\":1.0,\"beta_fast\":30,\"beta_slow\":2,"
        "\"original_max_position_embeddings\":4096}}",
        "{\"model_type\":\"kimi_k2\",\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":40,"
        "\"rope_theta\":50000,\"mscale\":0.707,\"mscale_all_dim\":1.0,\"beta_fast\":30,"
        "\"beta_slow\":2,\"original_max_position_embeddings\":4096}}",
    };
    for (int i = 0; i < 2; i++) {
        mlai_model_config c;
        mla_diag diag = {{0}};
        must(parse(texts[i], &c, &diag), &diag, "parse");
        assert_true(c.rope.theta == 50000.0 && c.rope.beta_fast == 30.0 && c.rope.beta_slow == 2.0);
        double want = (0.0707 * log(40.0) + 1.0) / (0.1 * log(40.0) + 1.0);
        assert_true(fabs(c.rope.attention_factor - want) < 1e-12);
        assert_int_equal(c.num_heads, 128);
        assert_int_equal(c.n_routed_experts, 256);
        assert_true(c.norm_topk_prob && c.rope.is_interleaved);
        assert_int_equal(c.bos_token_id, -1);
        assert_int_equal(c.fp8_block_rows, 128);
    }
}

static void test_variations(void **state)
{
    (void)state;
    mlai_model_config c;
    mla_diag diag = {{0}};
    must(parse("{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":6,\"eos_token_id\":[7,9],"
               "\"rope_interleave\":false,\"moe_layer_freq\":2,\"bos_token_id\":3}",
               &c, &diag),
         &diag, "v2");
    assert_int_equal(c.topk_method, MLAI_TOPK_GREEDY);
    assert_int_equal(c.n_group, 1);
    assert_true(c.rope.is_interleaved && c.rope.type == MLAI_ROPE_DEFAULT);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos_token_ids[1], 9);
    assert_int_equal(c.bos_token_id, 3);
    assert_true(mlai_model_config_has_experts(&c, 0) && !mlai_model_config_has_experts(&c, 1));
    must(parse("{\"model_type\":\"deepseek_v3\",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4},"
               "\"n_routed_experts\":null,\"eos_token_id\":null,\"max_position_embeddings\":8192,"
               "\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[64,32]}}",
               &c, &diag),
         &diag, "v3");
    assert_true(c.rope.original_max_position == 8192.0);
    assert_true(fabs(c.rope.attention_factor - (0.1 * log(4.0) + 1.0)) < 1e-12);
    assert_int_equal(c.n_eos, 0);
    assert_int_equal(c.n_routed_experts, 0);
    assert_true(c.fp8_block_rows == 64 && c.fp8_block_cols == 32);
    must(parse("{\"model_type\":\"deepseek_v3\",\"rope_scaling\":{\"type\":\"linear\","
               "\"factor\":8}}",
               &c, &diag),
         &diag, "linear");
    assert_true(c.rope.type == MLAI_ROPE_LINEAR && c.rope.factor == 8.0);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *fields; /* after model_type */
        const char *part;
    } cases[] = {
        {"\"hidden_size\":0", "hidden_size"},
        {"\"hidden_size\":-1", "hidden_size"},
        {"\"hidden_size\":2.5", "hidden_size"},
        {"\"hidden_size\":\"7168\"", "hidden_size"},
        {"\"hidden_size\":1e300", "hidden_size"},
        {"\"num_attention_heads\":1000000000", "num_attention_heads"},
        {"\"num_attention_heads\":65536,\"v_head_dim\":65536", "num_attention_heads"},
        {"\"num_key_value_heads\":8", "num_key_value_heads"},
        {"\"qk_rope_head_dim\":63", "qk_rope_head_dim"},
        {"\"q_lora_rank\":0", "q_lora_rank"},
        {"\"n_group\":7", "n_group"},
        {"\"n_group\":null", "n_group"},
        {"\"n_group\":256", "n_group"},
        {"\"topk_group\":9", "topk_group"},
        {"\"num_experts_per_tok\":0", "num_experts_per_tok"},
        {"\"num_experts_per_tok\":200", "num_experts_per_tok"},
        {"\"topk_method\":\"greedy\"", "topk_method"},
        {"\"scoring_func\":\"softmax\"", "scoring_func"},
        {"\"hidden_act\":\"gelu\"", "hidden_act"},
        {"\"mlp_bias\":true", "mlp_bias"},
        {"\"attention_bias\":1", "attention_bias"},
        {"\"rms_norm_eps\":-1", "rms_norm_eps"},
        {"\"rms_norm_eps\":1e999", "rms_norm_eps"},
        {"\"routed_scaling_factor\":\"x\"", "routed_scaling_factor"},
        {"\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}", "rope type"},
        {"\"rope_scaling\":[1]", "rope_scaling"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":0}", "factor"},
        {"\"rope_parameters\":{\"rope_type\":\"yarn\",\"beta_fast\":0}", "beta_fast"},
        {"\"rope_parameters\":{\"rope_theta\":0}", "rope_theta"},
        {"\"rope_parameters\":{\"partial_rotary_factor\":0.5}", "partial_rotary_factor"},
        {"\"bos_token_id\":129280", "bos_token_id"},
        {"\"eos_token_id\":129280", "eos_token_id"},
        {"\"eos_token_id\":[1,-1]", "eos_token_id"},
        {"\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "eos_token_id"},
        {"\"quantization_config\":{\"quant_method\":\"awq\"}", "quant_method"},
        {"\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}",
         "weight_block_size"},
        {"\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[0,128]}",
         "weight_block_size"},
    };
    mlai_model_config c;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[512];
        mla_diag diag = {{0}};
        snprintf(text, sizeof text, "{\"model_type\":\"deepseek_v3\",%s}", cases[i].fields);
        mla_status status = parse(text, &c, &diag);
        assert_true(status == MLA_ERROR_FILE || status == MLA_ERROR_UNSUPPORTED);
        if (strstr(diag.text, cases[i].part) == NULL)
            fail_msg("\"%s\" does not name %s", diag.text, cases[i].part);
        assert_int_equal(parse(text, &c, NULL), status);
    }
    mla_diag diag = {{0}};
    assert_int_equal(parse("{\"model_type\":\"llama\"}", &c, &diag), MLA_ERROR_UNSUPPORTED);
    assert_int_equal(parse("{}", &c, &diag), MLA_ERROR_UNSUPPORTED);
    assert_int_equal(parse("[]", &c, &diag), MLA_ERROR_FILE);
    assert_int_equal(
        parse("{\"model_type\":\"deepseek_v2\",\"topk_method\":\"noaux_tc\"}", &c, &diag),
        MLA_ERROR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shipped_configs),
        cmocka_unit_test(test_two_spellings),
        cmocka_unit_test(test_variations),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
