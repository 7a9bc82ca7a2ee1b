//! `docs/config.md` and the JSON schema follow the option table.

use ferrospeed_config::table::{Key, Kind, ROOT};
use ferrospeed_config::{AutoValues, Config, docs, schema};
use serde_json::{Value, json};

#[test]
fn the_manual_is_not_stale() {
    let path = ferrospeed_testkit::golden::repository_root().join("docs/config.md");
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == docs::render(),
        "docs/config.md is stale: write it anew with `cargo run -p ferrospeed-config --example write_docs > docs/config.md`"
    );
}

#[test]
fn every_key_that_does_not_act_is_listed_with_its_reason() {
    let path = ferrospeed_testkit::golden::repository_root().join("docs/differences.md");
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    for (name, table) in
        [("differences", docs::without_effect()), ("always", docs::always_so()), ("refused", docs::refused())]
    {
        assert!(
            written.contains(&table),
            "a table in docs/differences.md is stale: write it anew with `cargo run -p ferrospeed-config --example write_docs -- {name}`"
        );
    }
}

#[test]
fn at_most_forty_keys_do_nothing_and_each_says_why() {
    let count = docs::count_without_effect();
    assert!(count <= 40, "{count} keys do nothing");
    assert!(!docs::without_effect().contains("nothing is said of it"), "{}", docs::without_effect());
}

#[test]
fn every_default_is_json_of_its_own_type() {
    fn check(keys: &'static [Key], path: &str) {
        for key in keys {
            let default: Value = serde_json::from_str(key.default)
                .unwrap_or_else(|error| panic!("{path}{}: {error}", key.name));
            let section = matches!(
                key.kind,
                Kind::Section(..) | Kind::Variants { .. } | Kind::Named(_) | Kind::Either(_)
            );
            assert!(!section || !default.is_boolean(), "{path}{}: {default}", key.name);
            if let Some((children, _)) = key.children() {
                check(children, &format!("{path}{}.", key.name));
            }
        }
    }
    check(ROOT, "");
}

#[test]
fn a_resolved_configuration_written_out_resolves_to_itself() {
    let elastic = json!({ "enabled": true, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4] });
    written_out_resolves_to_itself(&json!({ "elasticity": elastic }));
    written_out_resolves_to_itself(
        &json!({ "train_batch_size": 8, "optimizer": {}, "aio": null, "steps_per_print": null }),
    );
    written_out_resolves_to_itself(&json!({
        "train_batch_size": 32,
        "optimizer": { "type": "adamw", "params": { "lr": 1e-4 } },
        "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 10 } },
        "bf16": { "enabled": true },
        "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "cpu" } },
        "sparse_attention": { "mode": "bigbird" },
    }));
}

fn written_out_resolves_to_itself(input: &Value) {
    let ranks = 4.try_into().expect("4 is not 0");
    let (first, _) = Config::from_value("first", input)
        .expect("readable")
        .resolve(ranks, &AutoValues::new())
        .expect("valid");
    let written = first.to_json();
    let (second, _) = Config::from_value("second", &written)
        .expect("readable")
        .resolve(ranks, &AutoValues::new())
        .expect("valid");
    assert_eq!(first, second);
    assert_eq!(first.canonical_hash(), second.canonical_hash());
}

#[test]
fn the_hash_sees_values_and_not_spelling() {
    let hash = |value: Value| {
        let ranks = 1.try_into().expect("1 is not 0");
        let (config, _) = Config::from_value("c", &value)
            .expect("readable")
            .resolve(ranks, &AutoValues::new())
            .expect("valid");
        config.canonical_hash()
    };
    let plain = hash(
        json!({ "train_batch_size": 8, "zero_optimization": { "stage": 3, "prefetch_bucket_size": 5e7 } }),
    );
    let aliased = hash(
        json!({ "zero_optimization": { "stage3_prefetch_bucket_size": 50_000_000, "stage": 3 }, "train_batch_size": 8.0 }),
    );
    let other = hash(json!({ "train_batch_size": 8, "zero_optimization": { "stage": 2 } }));
    assert_eq!(plain, aliased);
    assert_ne!(plain, other);
}

#[test]
fn the_schema_lists_every_top_level_key() {
    let schema = schema::render();
    for key in ROOT {
        assert!(schema["properties"].get(key.name).is_some(), "{}", key.name);
    }
    assert_eq!(schema["additionalProperties"], false);
    let optimizer = &schema["properties"]["optimizer"]["anyOf"][0];
    assert_eq!(optimizer["allOf"][0]["if"]["properties"]["type"]["pattern"], "^([aA][dD][aA][mM])$");
    let adam = &optimizer["allOf"][0]["then"]["properties"]["params"]["anyOf"][0]["properties"];
    assert!(adam["betas"]["description"].is_string(), "{adam}");
    assert_eq!(
        schema["properties"]["zero_optimization"]["anyOf"][0]["anyOf"][0]["properties"]["stage"]["anyOf"][0]
            ["enum"],
        json!([0, 1, 2, 3])
    );
}
