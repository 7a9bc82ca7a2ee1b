//! The messages a user meets, word for word.

use ferrospeed_config::{AutoValues, Code, Config, ConfigError};

fn refuse(text: &str) -> String {
    refuse_on(1, text)
}

fn refuse_on(ranks: u64, text: &str) -> String {
    let ranks = ranks.try_into().expect("a positive number of ranks");
    match Config::from_str("ds.json", text)
        .and_then(|unresolved| unresolved.resolve(ranks, &AutoValues::new()))
    {
        Err(error) => error.to_string(),
        Ok(_) => panic!("accepted: {text}"),
    }
}

fn warnings(text: &str) -> String {
    let ranks = 1.try_into().expect("1 is not 0");
    let (_, report) = Config::from_str("ds.json", text)
        .expect("readable")
        .resolve(ranks, &AutoValues::new())
        .expect("valid");
    report.to_string()
}

#[test]
fn a_typo_names_the_key_that_was_meant() {
    assert_eq!(
        refuse("{\n  \"train_batch_size\": 8,\n  \"zero_optimization\": { \"stgae\": 2 }\n}"),
        "ds.json:3:26: error: `zero_optimization.stgae`: unknown key\n  help: did you mean `stage`?"
    );
}

#[test]
fn a_misplaced_key_names_its_section() {
    assert_eq!(
        refuse("{ \"train_batch_size\": 8, \"overlap_comm\": true }"),
        "ds.json:1:26: error: `overlap_comm`: unknown key\n  help: `overlap_comm` belongs in `zero_optimization`"
    );
}

#[test]
fn a_duplicate_names_the_first_line() {
    assert_eq!(
        refuse("{\n  \"fp16\": { \"enabled\": true,\n    \"enabled\": false },\n  \"train_batch_size\": 1 }"),
        "ds.json:3:5: error: `fp16.enabled`: duplicate key; it stands first on line 2\n  help: keep one of the two"
    );
}

#[test]
fn a_wrong_type_shows_what_was_expected_and_found() {
    assert_eq!(
        refuse("{ \"train_batch_size\": \"32\" }"),
        "ds.json:1:23: error: `train_batch_size`: expected an integer ≥ 1, found the string \"32\"\n  help: write 32 without quotes"
    );
}

#[test]
fn a_range_shows_its_ends() {
    assert_eq!(
        refuse(
            "{ \"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3, \"offload_optimizer\": {\"ratio\": 1.5}} }"
        ),
        "ds.json:1:91: error: `zero_optimization.offload_optimizer.ratio`: expected a number ≥ 0 and ≤ 1, found 1.5"
    );
}

#[test]
fn an_unknown_optimizer_lists_the_known_ones() {
    assert_eq!(
        refuse("{ \"train_batch_size\": 8, \"optimizer\": {\"type\": \"AdmaW\"} }").lines().next(),
        Some("ds.json:1:48: error: `optimizer.type`: there is no \"AdmaW\"")
    );
}

#[test]
fn a_missing_schedule_parameter_is_asked_for() {
    assert_eq!(
        refuse("{ \"train_batch_size\": 8, \"scheduler\": {\"type\": \"WarmupDecayLR\"} }"),
        "ds.json:1:26: error: `scheduler.params.total_num_steps`: required by WarmupDecayLR, but not given\n  help: add \"total_num_steps\": an integer ≥ 1"
    );
}

#[test]
fn batch_sizes_that_disagree_are_shown_as_a_sum() {
    assert_eq!(
        refuse_on(
            2,
            "{ \"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 2 }"
        ),
        "ds.json:1:3: error: `train_batch_size`: train_batch_size is not micro batch × accumulation steps × ranks: 32 ≠ 4 × 2 × 2\n  help: write \"train_batch_size\": 16, or remove one of the three"
    );
    assert_eq!(
        refuse_on(4, "{ \"train_batch_size\": 33, \"train_micro_batch_size_per_gpu\": 4 }"),
        "ds.json:1:3: error: `train_batch_size`: 33 samples cannot be divided evenly over micro batches of 4 on 4 ranks\n  help: write a train_batch_size that is a multiple of 16, such as 32 or 48"
    );
}

#[test]
fn an_unfilled_auto_is_named() {
    assert_eq!(
        refuse("{ \"train_batch_size\": 8, \"gradient_clipping\": \"auto\" }"),
        "ds.json:1:26: error: `gradient_clipping`: is \"auto\", and neither the recipe nor the model gives a value for it\n  help: write the value, remove the key to take the default, or use a recipe that names this file, which fills it in"
    );
}

#[test]
fn a_filled_auto_is_checked_like_a_written_value() {
    let text = "{ \"train_batch_size\": \"auto\", \"gradient_clipping\": \"auto\" }";
    let unresolved = Config::from_str("ds.json", text).expect("readable");
    let ranks = 2.try_into().expect("2 is not 0");
    let auto = AutoValues::new().with("train_batch_size", 16).with("gradient_clipping", 1.0);
    let (config, _) = unresolved.resolve(ranks, &auto).expect("valid");
    assert_eq!(config.batch.train_micro_batch_size_per_gpu.get(), 8);
    assert_eq!(config.gradient_clipping, Some(1.0));
    let bad = unresolved.resolve(ranks, &auto.with("gradient_clipping", -1.0)).expect_err("negative");
    assert_eq!(
        bad.to_string(),
        "ds.json:1:31: error: `gradient_clipping`: expected a number ≥ 0, found -1.0"
    );
}

#[test]
fn an_unquoted_string_that_ate_its_line_is_blamed() {
    assert_eq!(
        refuse("{\n  train_batch_size: 8\n  optimizer: {type: Adam, params: {lr: 0.001}}\n}"),
        "ds.json:4:2: error: the text ends, but the bracket opened at line 1 column 1 is not closed\n  help: the string at line 3 column 21 has no quotes, so it runs to the end of its line; write \"Adam\""
    );
}

#[test]
fn fp16_and_bf16_exclude_each_other() {
    assert_eq!(
        refuse("{ \"train_batch_size\": 8, \"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true} }"),
        "ds.json:1:62: error: `bf16.enabled`: fp16 and bf16 are both enabled\n  help: keep one of them"
    );
}

#[test]
fn ten_mistakes_give_ten_messages() {
    let text = r#"{
        "train_batch_size": 0,
        "gradient_clipping": -1,
        "steps_per_print": "often",
        "zero_optimization": { "stage": 7, "reduce_bucket_size": -1, "nope": 1 },
        "fp16": { "enable": true, "hysteresis": 0 },
        "optimizer": { "type": "Adam", "params": { "betas": [0.9], "lr": "1e-3" } },
    }"#;
    let Err(ConfigError::Invalid(report)) = Config::from_str("ds.json", text)
        .expect("readable")
        .resolve(1.try_into().expect("1 is not 0"), &AutoValues::new())
    else {
        panic!("accepted")
    };
    assert_eq!(report.errors().count(), 10, "{report}");
    let lines: Vec<usize> =
        report.errors().filter_map(|error| error.position).map(|position| position.line).collect();
    assert!(lines.is_sorted(), "{lines:?}");
}

#[test]
fn deprecated_and_unimplemented_keys_warn_once_each() {
    assert_eq!(
        warnings("{ \"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 2, \"cpu_offload\": true} }"),
        "ds.json:1:60: warning: `zero_optimization.cpu_offload`: deprecated\n  help: write \"offload_optimizer\": {\"device\":\"cpu\"}"
    );
    assert_eq!(
        warnings("{ \"train_batch_size\": 8, \"comet\": {\"enabled\": true, \"project\": \"x\"} }"),
        "ds.json:1:26: warning: `comet`: has no effect: there is no client of Comet here: `csv_monitor`, `tensorboard` and `wandb` keep curves"
    );
    assert_eq!(warnings("{ \"train_batch_size\": 8, \"comet\": {\"enabled\": false} }"), "");
    assert_eq!(
        refuse(
            "{ \"train_batch_size\": 8, \"data_efficiency\": {\"enabled\": true, \"data_sampling\": {\"dynamic_batching\": {\"enabled\": true}}} }"
        ),
        "ds.json:1:81: error: `data_efficiency.data_sampling.dynamic_batching`: not supported: batches have as many samples as the file says; recipes pack sequences to one length instead\n  help: remove it"
    );
}

#[test]
fn comments_may_stand_as_keys() {
    assert_eq!(
        warnings("{ \"_why\": \"baseline\", \"train_batch_size\": 8, \"fp16\": {\"_note\": [1]} }"),
        ""
    );
}

#[test]
fn a_root_that_is_no_object_is_refused() {
    assert!(
        refuse("[1, 2]").starts_with("ds.json:1:1: error: the configuration must be an object, found a list")
    );
}

#[test]
fn an_argument_that_is_nothing_says_so() {
    let message = Config::from_argument("no_such_file.json").expect_err("no such file").to_string();
    assert!(
        message.starts_with("`no_such_file.json` is neither an existing file nor URL-safe base64"),
        "{message}"
    );
}

#[test]
fn an_elastic_world_size_that_does_not_fit_lists_those_that_do() {
    let message = refuse_on(
        7,
        r#"{"elasticity": {"enabled": true, "max_train_batch_size": 100, "micro_batch_sizes": [8], "version": 0.1}}"#,
    );
    assert_eq!(
        message,
        "ds.json:1:2: error: `elasticity`: 7 model replicas do not divide the elastic batch 96; these numbers do: [1, 2, 3, 4, 6, 12]\n  help: start one of these numbers of ranks"
    );
}

#[test]
fn overrides_are_checked_with_the_rest() {
    let mut source =
        Config::from_str("ds.json", "{ \"train_batch_size\": 8 }").expect("readable").source().clone();
    ferrospeed_config::set(&mut source, "zero_optimization.stage=9").expect("a well-formed override");
    let report = Config::from_value("ds.json", &source).expect("readable").report();
    assert_eq!(report.errors().map(|error| error.code).collect::<Vec<_>>(), [Code::NotAChoice]);
    let bad = ferrospeed_config::set(&mut source, "zero_optimization").expect_err("no value");
    assert_eq!(bad.to_string(), "cannot apply the override `zero_optimization`: write it as path=value");
}

#[test]
fn overrides_leave_the_places_of_the_rest() {
    let text = "{\n  \"train_batch_size\": 8,\n  \"stepz_per_print\": 1,\n  \"zero_optimization\": true\n}";
    let overridden =
        Config::from_str("ds.json", text).expect("readable").with_overrides(&["zero_optimization.stage=9"]);
    assert_eq!(
        overridden.expect("well-formed").report().to_string(),
        "ds.json:3:3: error: `stepz_per_print`: unknown key\n  help: did you mean `steps_per_print`?\nds.json: error: `zero_optimization.stage`: expected 0, 1, 2 or 3, found 9"
    );
}

#[test]
fn only_what_nothing_acts_on_is_said_to_be_so() {
    assert_eq!(
        warnings(
            "{ \"train_batch_size\": 1, \"checkpoint\": { \"load_universal\": true, \"tag_validation\": \"Fail\" } }"
        ),
        ""
    );
    assert_eq!(
        refuse("{ \"train_batch_size\": 1, \"checkpoint\": { \"use_node_local_storage\": true } }"),
        "ds.json:1:42: error: `checkpoint.use_node_local_storage`: not supported: a checkpoint lies in one folder that all hosts see; copy what a host needs to its disk\n  help: remove it"
    );
    // What always happens may be asked for; the other value cannot be had.
    let zero = |key: &str| {
        format!("{{ \"train_batch_size\": 1, \"zero_optimization\": {{ \"stage\": 2, {key} }} }}")
    };
    assert_eq!(warnings(&zero("\"elastic_checkpoint\": true, \"contiguous_gradients\": true")), "");
    assert!(
        warnings(&zero("\"contiguous_gradients\": false")).contains("has no effect: gradients always travel")
    );
    let refused = refuse(
        "{ \"train_batch_size\": 1, \"optimizer\": { \"type\": \"Lamb\", \"params\": { \"max_coeff\": 0.001 } } }",
    );
    assert_eq!(
        refused,
        "ds.json:1:57: error: `optimizer.params.min_coeff`: 0.01 is larger than max_coeff 0.001\n  help: exchange them"
    );
}

#[test]
fn what_the_rest_of_a_configuration_leaves_without_effect_is_told() {
    let eigenvalue = r#"{"train_batch_size": 1, "bf16": {"enabled": true}, "eigenvalue": {"enabled": true}}"#;
    assert!(warnings(eigenvalue).contains("eigenvalue.enabled`: has no effect with 16-bit weights"));
    let sparse = r#"{"train_batch_size": 1, "sparse_gradients": true, "zero_optimization": {"stage": 2}}"#;
    assert!(warnings(sparse).contains("sparse_gradients`: has no effect in stage 2"));
    for acts in [
        r#"{"train_batch_size": 1, "eigenvalue": {"enabled": true}}"#,
        r#"{"train_batch_size": 1, "sparse_gradients": true}"#,
    ] {
        assert_eq!(warnings(acts), "", "{acts}");
    }
}

#[test]
fn a_job_whose_name_leads_out_of_its_folder_is_refused() {
    for section in ["tensorboard", "csv_monitor"] {
        for name in ["../../x", "/etc", "a/../../b"] {
            let text = format!(
                "{{ \"train_batch_size\": 8, \"{section}\": {{\"enabled\": true, \"output_path\": \"curves\",\n\"job_name\": {name:?}}} }}"
            );
            assert_eq!(
                refuse(&text),
                format!(
                    "ds.json:2:1: error: `{section}.job_name`: {name:?} leads out of `{section}.output_path`\n  help: write a plain name here, and the folder in `output_path`"
                )
            );
            assert_eq!(warnings(&text.replace("true", "false")), "", "what is off writes nothing");
        }
        let below = format!(
            "{{ \"train_batch_size\": 8, \"{section}\": {{\"enabled\": true, \"job_name\": \"mine/first\"}} }}"
        );
        assert_eq!(warnings(&below), "");
    }
}

/// A curriculum by one metric, as these words of JSON say.
fn curriculum(name: &str, metric: &str) -> String {
    format!(
        r#"{{"train_batch_size": 1, "data_efficiency": {{"data_sampling": {{"curriculum_learning": {{"enabled": true,
            "curriculum_metrics": {{"{name}": {{{metric}}}}}}}}}}}}}"#
    )
}

#[test]
fn a_curriculum_by_metrics_names_what_it_lacks() {
    const SCHEDULE: &str = r#""min_difficulty": 1, "max_difficulty": 9, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1}"#;
    let by = |rest: &str| format!("{SCHEDULE}, {rest}");
    let value =
        by(r#""difficulty_type": "value", "clustering_type": "schedule_based", "index_to_sample_path": "s""#);
    let whole = format!(r#"{value}, "index_to_metric_path": "m""#);
    assert_eq!(warnings(&curriculum("rarity", &whole)), "");
    let percentile =
        whole.replace("\"value\"", "\"percentile\"").replace(", \"index_to_metric_path\": \"m\"", "");
    assert_eq!(warnings(&curriculum("rarity", &percentile)), "");
    let cut = by(r#""clustering_type": "single_cluster""#);
    assert_eq!(warnings(&curriculum("seqlen_truncate", &cut)), "");

    let lacks = refuse(&curriculum("rarity", &value));
    assert!(
        lacks.contains("curriculum_metrics.rarity.index_to_metric_path`: required by curriculum learning"),
        "{lacks}"
    );
    let all = refuse(&curriculum("rarity", ""));
    for key in
        ["clustering_type", "min_difficulty", "schedule_type", "difficulty_type", "index_to_sample_path"]
    {
        assert!(all.contains(&format!("curriculum_metrics.rarity.{key}`: required by")), "{key}: {all}");
    }
    for (name, metric, part) in [
        ("rarity", cut.clone(), "a metric of one cluster chooses no sequences"),
        ("seqlen_truncate", whole.clone(), "cuts sequences, and chooses none"),
        ("rarity", whole.replace("fixed_linear", "custom"), "a function, which a file cannot hold"),
        (
            "rarity",
            percentile.replace(": 9", ": 0").replace(": 1,", ": 0,"),
            "percentiles are parts of the sequences",
        ),
    ] {
        let said = refuse(&curriculum(name, &metric));
        assert!(said.contains(part), "{part}: {said}");
    }
    let both = curriculum("seqlen_truncate", &cut).replacen(
        '{',
        &format!(r#"{{"curriculum_learning": {{"enabled": true, {SCHEDULE}}}, "#),
        1,
    );
    assert!(refuse(&both).contains("`curriculum_learning` cuts sequences too"), "{}", refuse(&both));
    let alone =
        warnings(r#"{"train_batch_size": 1, "data_efficiency": {"data_sampling": {"enabled": true}}}"#);
    assert!(alone.contains("has an effect with `curriculum_learning.enabled` only"), "{alone}");
}

#[test]
fn infinity_as_python_writes_it_is_never() {
    let resolved = |text: &str| {
        let read = Config::from_str("ds.json", text).expect(text);
        let ranks = 1.try_into().expect("1 is not 0");
        let resolved = read.resolve(ranks, &AutoValues::new());
        resolved.unwrap_or_else(|error| panic!("{text}: {error}")).0
    };
    for infinity in ["Infinity", "\"Infinity\"", "\"inf\"", "inf\n", "null"] {
        // What accelerate writes stands between others.
        let config = resolved(&format!("{{ \"steps_per_print\": {infinity}, \"train_batch_size\": 8 }}"));
        assert_eq!(config.steps_per_print, None, "{infinity}");
        assert!(config.to_json()["steps_per_print"].is_null(), "{infinity}");
    }
    assert_eq!(
        refuse("{ \"train_batch_size\": 8, \"steps_per_print\": -Infinity }"),
        "ds.json:1:45: error: `steps_per_print`: expected an integer ≥ 1, or Infinity, found the string \"-Infinity\""
    );
    assert_eq!(
        refuse("{ \"train_batch_size\": \"inf\" }"),
        "ds.json:1:23: error: `train_batch_size`: expected an integer ≥ 1, found the string \"inf\""
    );
    resolved("{ \"train_batch_size\": 8, \"compile\": { \"disable\": false, \"backend\": \"inductor\" } }");
}

#[test]
fn a_version_of_deepspeed_brings_its_defaults_with_it() {
    let resolved = |compat: &str| {
        let text = format!(
            r#"{{ {compat} "train_batch_size": 8, "optimizer": {{ "type": "AdamW", "params": {{ "lr": 0.1 }} }},
                 "scheduler": {{ "type": "WarmupLR", "params": {{}} }},
                 "zero_optimization": {{ "stage": 2, "offload_optimizer": {{ "device": "cpu" }} }} }}"#
        );
        let read = Config::from_str("ds.json", &text).expect("readable");
        let (config, _) = read.resolve(1.try_into().expect("1"), &AutoValues::new()).expect("valid");
        let full = config.to_json();
        let pinned = full["zero_optimization"]["offload_optimizer"]["pin_memory"].clone();
        let highest = full["scheduler"]["params"]["warmup_max_lr"].clone();
        (config.gradient_clipping, config.steps_per_print, pinned, highest)
    };
    let old = (None, Some(10), false.into(), 0.001.into());
    assert_eq!(resolved(""), old);
    assert_eq!(resolved(r#""compat": "0.14.1","#), old);
    assert_eq!(resolved(r#""compat": "0.19.8","#), (Some(1.0), None, true.into(), serde_json::Value::Null));
}

#[test]
fn where_a_file_depends_on_the_version_it_says_so() {
    let drifted = |text: &str| -> Vec<String> {
        let read = Config::from_str("ds.json", text).expect("readable");
        read.drifted().iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        drifted(r#"{ "train_batch_size": 8, "elasticity": { "enabled": true }, "offload_nothing_": 1 }"#),
        [
            "`steps_per_print` is not given, which is 10, and null since 0.15.2",
            "`gradient_clipping` is not given, which is 0.0, and 1.0 since 0.19.3",
            "`elasticity` is given, which 0.19.8 refuses",
        ]
    );
    let said = r#"{ "compat": "0.19.8", "sparse_gradients": true, "eigenvalue": { "enabled": false } }"#;
    assert_eq!(drifted(said), ["`sparse_gradients` is given, which 0.19.8 refuses"]);
    let told = r#"{ "gradient_clipping": 1.0, "steps_per_print": 10, "zero_optimization": { "offload_optimizer": {} } }"#;
    assert_eq!(
        drifted(told),
        [
            "`zero_optimization.offload_optimizer.pin_memory` is not given, which is false, and true since 0.19.5"
        ]
    );
}

#[test]
fn a_rule_without_a_schedule_takes_none() {
    let refused = refuse(
        r#"{ "train_batch_size": 1, "optimizer": { "type": "ScheduleFreeAdamW" }, "scheduler": { "type": "WarmupLR" } }"#,
    );
    assert!(refused.contains("`scheduler`: ScheduleFreeAdamW has no schedule"), "{refused}");
    let refused = refuse(
        r#"{ "train_batch_size": 1, "optimizer": { "type": "ScheduleFreeAdamW", "params": { "betas": [0, 0.99] } } }"#,
    );
    assert!(refused.contains("write a first one above 0"), "{refused}");
}

#[test]
fn muon_says_what_it_cannot_do() {
    let muon = |more: &str, params: &str| {
        refuse(&format!(
            r#"{{ "train_batch_size": 1, {more} "optimizer": {{ "type": "muon", "params": {{ {params} }} }} }}"#
        ))
    };
    let heads = muon("", r#""per_head_muon": true"#);
    assert!(heads.contains("models do not say which rows of a matrix are whose head's"), "{heads}");
    let slices = muon(r#""tensor_parallel": { "autotp_size": 2 },"#, "");
    assert!(slices.contains("Muon needs whole matrices, and ranks hold slices of them"), "{slices}");
    let decay = muon("", r#""betas": [0.9, 0]"#);
    assert!(decay.contains("write a second decay above 0"), "{decay}");
}
