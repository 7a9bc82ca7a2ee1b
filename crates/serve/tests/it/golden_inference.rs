//! DeepSpeed's recorded inference configurations, AutoTP policies, shards and quantizers.
//!
//! Where DeepSpeed has a defect we do the right thing; each such place is one of the functions named `ours_…`.

use super::auto_tp::{Layer, block_layers, summed_layers};
use super::support;
use ferrospeed_comm::World;
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_serve::inference::engine::{GenerateCall, init_inference, init_inference_on};
use ferrospeed_serve::inference::merge::merged;
use ferrospeed_serve::inference::quantize::{group_quantizer, group_scales, weight_quantization};
use ferrospeed_serve::inference::shards::{FusedQkv, shard_sizes};
use ferrospeed_serve::inference::{InferenceConfig, InferenceError};
use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::{golden, read_json};
use ferrospeed_testkit::tensors;
use serde_json::{Map, Value, json};

/// Settings that hold objects of a program.
const OF_PYTHON: [&str; 6] =
    ["injection_policy_tuple", "mpu", "ep_group", "expert_group", "ep_mp_group", "expert_mp_group"];

/// Lengths that are no lengths, or not in order, are refused, and so is what only Python has; and a flag for `moe` means `enabled`.
fn ours_is_other(input: &Value) -> Option<Result<Value, &'static str>> {
    let below_one = |key: &str| input[key].as_i64().is_some_and(|value| value < 1);
    for key in ["min_out_tokens", "max_out_tokens", "min_tokens", "max_tokens"] {
        if below_one(key) {
            return Some(Err("is no number of tokens"));
        }
    }
    let length = |keys: [&str; 2]| keys.iter().find_map(|key| input[*key].as_i64());
    let most = length(["max_tokens", "max_out_tokens"]).unwrap_or(1024);
    if length(["min_tokens", "min_out_tokens"]).is_some_and(|least| least > most) {
        return Some(Err("is more than max_out_tokens"));
    }
    // What only a Python program has means nothing here.
    if OF_PYTHON.iter().any(|key| !input[*key].is_null()) {
        return Some(Err("is an object of a Python program"));
    }
    let enabled = input["moe"].as_bool()?;
    Some(Ok(json!({"moe": {"enabled": enabled, "ep_size": 1, "moe_experts": [1], "type": "standard",
                           "ep_mp_group": null, "ep_group": null}})))
}

#[test]
fn golden_configurations_are_read_as_recorded() {
    let set = golden();
    let Some(recorded) = set.json("inference/config_cases.json") else { return };
    let file = "inference/config_cases.json";
    let defaults = set.named_rows(file, &recorded, "defaults");
    let mut cases = Cases::of(file);
    for case in set.rows(file, &recorded, "cases") {
        cases.check(&case["input"], || {
            let read = InferenceConfig::new(case["input"].as_object().unwrap());
            let (ok, changed) = match ours_is_other(&case["input"]) {
                Some(Ok(changed)) => (true, changed),
                Some(Err(why)) => {
                    assert!(read.unwrap_err().to_string().contains(why));
                    return;
                }
                None => (case["ok"] == true, case["changed"].clone()),
            };
            if !ok {
                return assert_refused(&read.unwrap_err(), case);
            }
            let config = read.unwrap();
            let missing: Vec<&str> =
                case["missing_fields"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            for (key, default) in &defaults {
                let found = config.values().get(key);
                if missing.contains(&key.as_str()) {
                    assert_eq!(found, None, "{key} is replaced");
                } else if key == "zero" {
                    // Kept as given: nothing acts on it.
                    assert_eq!(found, Some(case["input"].get("zero").unwrap_or(&json!({}))));
                } else {
                    assert_eq!(found, Some(changed.get(key).unwrap_or(default)), "{key}");
                }
            }
            assert_eq!(config.values().len() + missing.len(), defaults.len(), "no other setting");
            let warnings: Vec<&str> =
                case["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            assert_eq!(config.warnings(), warnings);
        });
    }
    cases.finish(&set, 58);
}

fn assert_refused(error: &InferenceError, case: &Value) {
    let recorded = case["error"].as_str().unwrap();
    match case["error_type"].as_str().unwrap() {
        "ValidationError" => {
            let places: Vec<&str> = recorded.lines().skip(1).filter(|line| !line.starts_with(' ')).collect();
            let InferenceError::Setting { path, .. } = error else { panic!("{error:?}") };
            assert!(places.contains(&path.join(" -> ").as_str()), "{error} is not at {places:?}");
            let reason = recorded
                .lines()
                .nth(2)
                .unwrap()
                .trim()
                .split([' ', ';'])
                .take(4)
                .collect::<Vec<_>>()
                .join(" ");
            let several = places.len() > 1;
            assert!(several || error.to_string().contains(&reason), "'{error}' does not say '{reason}'");
        }
        "FileNotFoundError" => assert!(error.to_string().contains("/nonexistent.json"), "{error}"),
        _ => assert_eq!(error.to_string(), recorded),
    }
}

/// Processors compute in 16-bit floats here, so the default type is no error; and no GPU is asked.
fn ours_computes(case: &Value) -> bool {
    case["error"] == "Type fp16 is not supported."
}

#[test]
fn golden_ways_of_calling_init_inference() {
    let set = golden();
    let Some(recorded) = set.json("inference/init_inference_cases.json") else { return };
    let folder = support::model(&support::families()[0]);
    let mut cases = Cases::of("inference/init_inference_cases.json: init_inference");
    for case in set.rows("inference/init_inference_cases.json", &recorded, "init_inference") {
        cases.check(case, || {
            let file = folder.path().join("config-of-the-call.json");
            let config = match case["config"].as_str().and_then(|text| text.strip_prefix("FILE:")) {
                Some(text) => {
                    std::fs::write(&file, text).unwrap();
                    json!(file.to_str().unwrap())
                }
                None => case["config"].clone(),
            };
            let (before, arguments) = (config.clone(), case["kwargs"].as_object().unwrap());
            let engine =
                init_inference(&folder.path().join("tiny"), &config, arguments, &ferrospeed_cpu::device());
            assert_eq!(config, before, "what the caller has stays as it is");
            if case["ok"] != true && !ours_computes(case) {
                return assert_refused(&engine.unwrap_err(), case);
            }
            let engine = engine.unwrap();
            for key in ["dtype", "max_out_tokens", "min_out_tokens"] {
                if let Some(value) = case.get(key) {
                    assert_eq!(&engine.config().values()[key], value, "{key}");
                }
            }
            if let Some(size) = case["tp_size"].as_u64() {
                assert_eq!(engine.config().tensor_parallel_size().unwrap(), size as usize);
            }
        });
    }
    cases.finish(&set, 14);
}

#[test]
fn golden_calls_of_the_engine() {
    let set = golden();
    let Some(recorded) = set.json("inference/init_inference_cases.json") else { return };
    let folder = support::model(&support::families()[0]);
    let start = |more: Value| {
        let arguments = more.as_object().unwrap();
        init_inference(
            &folder.path().join("tiny"),
            &json!({"dtype": "fp32"}),
            arguments,
            &ferrospeed_cpu::device(),
        )
    };
    let generate = |prompt: usize, new: usize, most: usize, beams: Option<usize>| {
        let engine = start(json!({"max_tokens": most})).unwrap();
        let call = GenerateCall { max_new_tokens: new, num_beams: beams, ..Default::default() };
        engine
            .generate(&[vec![1; prompt]], &call)
            .map(|texts| texts[0].len())
            .map_err(|error| error.to_string())
    };
    let mut cases = Cases::of("inference/init_inference_cases.json: engine");
    for case in set.rows("inference/init_inference_cases.json", &recorded, "engine") {
        let error = case["error"].as_str().unwrap_or_default();
        cases.check(&case["case"], || match case["case"].as_str().unwrap() {
            // A prompt and its answer must fit, however they are handed over.
            "positional_too_long" | "kw_ok_prompt_plus_new_exceeds" => {
                assert!(generate(12, 2, 10, None).unwrap_err().contains("exceeds maximum length of 10"));
                assert!(generate(8, 8, 10, None).unwrap_err().contains("Input with size 16"));
            }
            "kw_too_long" => assert_eq!(generate(12, 0, 10, None).unwrap_err(), error),
            "beams" | "beams_gen_config" => {
                assert!(generate(4, 4, 64, Some(2)).unwrap_err().contains("`num_beams` > 1"), "{error}");
            }
            "ok" => {
                assert_eq!(generate(4, 4, 10, Some(1)).unwrap() as u64, case["shape"][1].as_u64().unwrap())
            }
            "model_times_without_profile" => {
                assert_eq!(start(json!({})).unwrap().model_times().unwrap_err().to_string(), error);
            }
            "profile_model_time" => {
                let engine = start(json!({})).unwrap();
                engine.profile_model_time();
                let call = GenerateCall { max_new_tokens: 3, ..Default::default() };
                engine.generate(&[vec![1, 2]], &call).unwrap();
                let times = engine.model_times().unwrap();
                assert_eq!(times.len() as u64, case["n_after_3_forwards"].as_u64().unwrap());
                assert!(times.iter().all(|&ms| ms > 0.0));
                assert_eq!(
                    engine.model_times().unwrap().len() as u64,
                    case["n_after_read"].as_u64().unwrap()
                );
            }
            "injection_policy_bad_name" => {
                let policy =
                    json!({"injection_policy": {"LlamaDecoderLayer": ["self_attn.o_proj", "mlp.nope"]}});
                assert_eq!(start(policy).unwrap_err().to_string(), error);
                let good =
                    json!({"injection_policy": {"LlamaDecoderLayer": ["self_attn.o_proj", "mlp.down_proj"]}});
                assert!(start(good).is_ok());
            }
            "injection_policy_plus_kernel_inject" => {
                let both = json!({"injection_policy": {"X": "mlp.down_proj"}, "kernel_inject": true});
                assert_eq!(start(both).unwrap_err().to_string(), error);
            }
            other => panic!("the case {other} is not known"),
        });
    }
    cases.finish(&set, 10);
}

#[test]
fn a_model_on_two_ranks_gives_each_the_texts_of_the_whole_one_and_its_failures() {
    let of_families = support::families().into_iter().map(|config| (config, json!({"tp": {"tp_size": 2}})));
    let mixture = support::families().remove(3);
    let apart = [
        json!({"moe": {"ep_size": 2}}),
        json!({"ep_size": 2, "tp": {"tp_size": 2}}),
        json!({"moe": {"ep_size": 8, "enabled": false}, "tp": {"tp_size": 2}}),
    ];
    for (config, held) in of_families.chain(apart.map(|held| (mixture.clone(), held))) {
        let folder = support::model(&config);
        let prompts = vec![vec![3, 1, 4, 1, 5], vec![9, 2, 6]];
        let call = GenerateCall { max_new_tokens: 6, ..GenerateCall::default() };
        let on = |world: World| {
            let mut arguments = json!({"dtype": "fp32"});
            if world.size() > 1 {
                arguments.as_object_mut().unwrap().extend(held.as_object().unwrap().clone());
            }
            let device = ferrospeed_cpu::with_threads(1);
            let engine =
                init_inference_on(&world, &folder.path().join("tiny"), &arguments, &Map::new(), &device);
            let engine = engine.unwrap();
            let texts = engine.generate(&prompts, &call).unwrap();
            let too_many = GenerateCall { max_new_tokens: 1 << 20, ..call.clone() };
            let error = engine.generate(&prompts, &too_many).unwrap_err().to_string();
            assert!(error.contains("1048581"), "rank {}: {error}", world.rank());
            texts
        };
        let whole = on(World::solo());
        let on = &on;
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                World::threads(2).into_iter().map(|world| scope.spawn(move || on(world))).collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), whole, "{} {held}", config["model_type"]);
            }
        });
    }
}

#[test]
fn what_is_not_built_is_refused_and_what_has_no_effect_is_named() {
    let folder = support::model(&support::families()[0]);
    let start = |more: Value| {
        init_inference(&folder.path().join("tiny"), &more, &Map::new(), &ferrospeed_cpu::device())
    };
    for (config, what) in [
        (json!({"tp": {"tp_size": 2}}), "tensor_parallel.tp_size"),
        (json!({"mp_size": 2}), "tensor_parallel.tp_size"),
        (json!({"moe": {"ep_size": 2}}), "moe.ep_size"),
        (json!({"moe": {"ep_size": 2, "enabled": true}, "tp": {"tp_size": 2}}), "tensor_parallel.tp_size"),
        (
            json!({"checkpoint": {"type": "Megatron", "checkpoints": [], "version": 1}}),
            "a Megatron checkpoint",
        ),
        (
            json!({"checkpoint": {"type": "ds_model", "version": 1, "checkpoints": {"tp": ["a"]}}}),
            "a checkpoint in slices",
        ),
        (json!({"checkpoint": {}, "save_mp_checkpoint_path": "x"}), "save_mp_checkpoint_path"),
        (json!({"args": {"x": 1}}), "config"),
    ] {
        let error = start(config.clone()).unwrap_err();
        assert!(error.to_string().starts_with(&format!("{what} is not supported")), "{config}: {error}");
    }
    let engine =
        start(json!({"dtype": "bf16", "zero": {"stage": 3}, "tm": true, "replace_method": "auto"})).unwrap();
    let named = ["replace_method is deprecated", "zero has no effect", "triangular_masking has no effect"];
    assert!(
        named.iter().all(|name| engine.warnings().iter().any(|warning| warning.contains(name))),
        "{:?}",
        engine.warnings()
    );
    assert!(merged(&json!(1), &Map::new()).is_err());
    for (config, told) in [
        (
            json!({"tp": {"tp_size": 4}, "moe": {"ep_size": 2}}),
            "4 slices and experts on 2 ranks do not go together",
        ),
        (json!({"moe": {"ep_size": 0}}), "moe -> ep_size: 0 is no number of ranks"),
    ] {
        assert!(start(config.clone()).unwrap_err().to_string().contains(told), "{config}");
    }
    let engine = start(json!({"moe": {"num_experts": [4], "type": "residual"}})).unwrap();
    for key in ["moe.moe_experts", "moe.type"] {
        let is_told =
            engine.warnings().iter().any(|warning| warning.starts_with(&format!("{key} has no effect")));
        assert!(is_told, "{key}: {:?}", engine.warnings());
    }
}

#[test]
fn an_engine_that_has_no_room_for_the_least_number_of_tokens_does_not_begin() {
    let folder = support::model(&support::families()[0]);
    let start = |least: u64| {
        let config = json!({"dtype": "fp32", "min_tokens": least, "max_tokens": 1 << 20});
        init_inference(&folder.path().join("tiny"), &config, &Map::new(), &ferrospeed_cpu::device())
    };
    assert!(start(8).is_ok());
    let error = start(1 << 19).unwrap_err().to_string();
    assert!(error.starts_with("min_out_tokens: 524288 tokens are expected, and"), "{error}");
}

#[test]
fn weights_are_read_from_where_a_description_says_and_written_so_that_one_can() {
    let folder = support::model(&support::families()[0]);
    let (directory, saved) = (folder.path().join("tiny"), folder.path().join("saved"));
    let call = GenerateCall { max_new_tokens: 12, ..GenerateCall::default() };
    let prompts = [vec![1, 2, 3], vec![9]];
    let written = |directory: &std::path::Path, more: Value| {
        let mut config = json!({"dtype": "fp32"});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let engine = init_inference(directory, &config, &Map::new(), &ferrospeed_cpu::device())?;
        engine.generate(&prompts, &call)
    };
    let expected = written(&directory, json!({"save_mp_checkpoint_path": saved})).unwrap();
    // A directory with all but the weights, and the description beside them; as a path, and as an object with a base of its own.
    let bare = folder.path().join("bare");
    std::fs::create_dir(&bare).unwrap();
    std::fs::copy(directory.join("config.json"), bare.join("config.json")).unwrap();
    let path = saved.join("ds_inference_config.json");
    assert_eq!(written(&bare, json!({"checkpoint": path})).unwrap(), expected);
    let mut description: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    description.as_object_mut().unwrap().shift_remove("base_dir");
    assert_eq!(written(&bare, json!({"checkpoint": description, "base_dir": saved})).unwrap(), expected);
    // What is wrong with it is told, and nothing that is there is written over.
    for (change, told) in [
        (json!({"type": "other"}), "checkpoint type is not supported"),
        (json!({"checkpoints": ["none.bin"]}), "none.bin"),
        (json!({"checkpoints": []}), "no list of files"),
        (json!({"mesh": 1}), "mesh: is not known"),
    ] {
        let mut description = description.clone();
        description.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let error =
            written(&bare, json!({"checkpoint": description, "base_dir": saved})).unwrap_err().to_string();
        assert!(error.contains(told), "{change}: {error}");
    }
    // `checkpoint_config` says the same in a section of its own; both together are one too many.
    assert_eq!(written(&bare, json!({"ckpt_config": {"checkpoint_dir": saved}})).unwrap(), expected);
    let again = folder.path().join("again");
    assert_eq!(
        written(&directory, json!({"checkpoint_config": {"save_mp_checkpoint_path": again}})).unwrap(),
        expected
    );
    assert!(again.join("ds_inference_config.json").exists());
    let twice = json!({"checkpoint": path, "checkpoint_config": {"checkpoint_dir": saved}});
    let error = written(&bare, twice).unwrap_err().to_string();
    assert!(error.starts_with("checkpoint_config -> checkpoint_dir: checkpoint says the same"), "{error}");
    let missing = written(&bare, json!({"checkpoint": {"type": "ds_model", "version": 1}})).unwrap_err();
    assert!(missing.to_string().contains("checkpoints: is missing"), "{missing}");
    assert!(written(&directory, json!({"save_mp_checkpoint_path": saved})).is_err());
}

/// The blocks of families that are not loaded here, as transformers 4.40 declares them: linears, and `ln` for layer norms.
fn foreign_block(family: &str) -> Option<&'static str> {
    Some(match family {
        "distilbert" => {
            "attention.q_lin attention.k_lin attention.v_lin attention.out_lin ln ffn.lin1 ffn.lin2 ln"
        }
        "gptj" => "ln attn.k_proj attn.v_proj attn.q_proj attn.out_proj mlp.fc_in mlp.fc_out",
        "gpt_neo" => {
            "ln attention.k_proj attention.v_proj attention.q_proj attention.out_proj ln mlp.c_fc mlp.c_proj"
        }
        "falcon" => {
            "self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h ln"
        }
        "t5" => {
            "SelfAttention.q SelfAttention.k SelfAttention.v SelfAttention.o ln EncDecAttention.q EncDecAttention.k \
             EncDecAttention.v EncDecAttention.o ln DenseReluDense.wi DenseReluDense.wo ln"
        }
        "bert" => "self.query self.key self.value output.dense ln intermediate.dense output.dense ln",
        "gpt2" => "ln attn.c_attn attn.c_proj ln mlp.c_fc mlp.c_proj",
        "phi" => "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2 ln",
        _ => return None,
    })
}

fn layers_of(family: &str) -> Vec<Layer> {
    if let Some(block) = foreign_block(family) {
        let layer = |word: &str| if word == "ln" { Layer::Norm } else { Layer::Linear(word.to_owned()) };
        return block.split_whitespace().map(layer).collect();
    }
    let config = json!({
        "model_type": family, "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "ffn_dim": 24, "word_embed_proj_dim": 16, "n_layer": 1, "n_head": 2,
    });
    // Fields that a family does not have are left out.
    let without = |keys: &[&str]| {
        let mut config = config.clone();
        keys.iter().for_each(|key| drop(config.as_object_mut().unwrap().remove(*key)));
        config
    };
    let experts = ["num_local_experts", "num_experts_per_tok"];
    let other = ["ffn_dim", "word_embed_proj_dim", "n_layer", "n_head"];
    let (config, prefix, layer_norms) = match family {
        "mixtral" => (without(&other), "model.layers.0", false),
        "opt" => (
            without(
                &[&experts[..], &["num_key_value_heads", "intermediate_size", "n_layer", "n_head"]].concat(),
            ),
            "model.decoder.layers.0",
            true,
        ),
        "gpt_neox" => (
            without(&[&experts[..], &other[..], &["num_key_value_heads"]].concat()),
            "gpt_neox.layers.0",
            true,
        ),
        "bloom" => (
            json!({"model_type": "bloom", "vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}),
            "transformer.h.0",
            true,
        ),
        _ => (without(&[&experts[..], &other[..]].concat()), "model.layers.0", false),
    };
    let model = ModelConfig::from_value(&config, WindowRule::default()).unwrap();
    let layers = block_layers(model.parameters().as_slice(), prefix, layer_norms);
    assert!(layers.len() > 4, "{family}: {layers:?}");
    layers
}

/// Phi's attention output is summed over ranks: what each has alone of it is a part of a sum, which DeepSpeed's rule does not find.
fn ours_sums_too(family: &str) -> &'static [&'static str] {
    if family == "phi" { &["self_attn.dense"] } else { &[] }
}

#[test]
fn golden_auto_tp_policies() {
    let set = golden();
    let Some(recorded) = set.json("inference/autotp_policies.json") else { return };
    let mut cases = Cases::of("inference/autotp_policies.json");
    for (family, case) in recorded.as_object().unwrap() {
        cases.check(family, || match (summed_layers(family, &layers_of(family)), case["error"].as_str()) {
            (Err(ours), Some(theirs)) => assert_eq!(ours, theirs),
            (Ok(ours), None) => {
                let mut theirs: Vec<String> = serde_json::from_value(case["policy"][0][1].clone()).unwrap();
                theirs.extend(ours_sums_too(family).iter().map(|layer| (*layer).to_owned()));
                theirs.sort();
                theirs.dedup();
                assert_eq!(ours, theirs);
            }
            (ours, theirs) => panic!("{ours:?} and {theirs:?}"),
        });
    }
    cases.finish(&set, 14);
    assert_eq!(summed_layers("phi", &layers_of("phi")).unwrap(), ["mlp.fc2", "self_attn.dense"]);
}

/// Two ranks of DeepSpeed's AutoTP: which layers of each block are cut and how, from the model's own parameters.
#[test]
fn golden_slices_of_two_ranks() {
    golden().each_entry("inference/tp2", ".json", 9, |path| {
        let recorded = read_json(path);
        let family = recorded["model"].as_str().unwrap();
        let Some(directory) = golden().path(&format!("models/{family}")) else { return };
        let config = read_json(&directory.join("config.json"));
        let parameters = ModelConfig::from_value(&config, WindowRule::default()).unwrap().parameters();
        let parameters = parameters.as_slice();
        let (prefix, layer_norms) = match family {
            "bert" => ("bert.encoder.layer.0", true),
            "gpt2" => ("transformer.h.0", true),
            "bloom" => ("transformer.h.0", true),
            "gpt_neox" => ("gpt_neox.layers.0", true),
            "opt" => ("model.decoder.layers.0", true),
            _ => ("model.layers.0", false),
        };
        let summed = match summed_layers(family, &block_layers(parameters, prefix, layer_norms)) {
            Ok(summed) => summed,
            Err(why) => return assert_eq!(recorded["error"], why, "{family}"),
        };
        let heads = ["num_key_value_heads", "num_attention_heads", "n_head"];
        let heads = heads.iter().find_map(|key| config[key].as_u64()).map(|heads| heads as usize);
        let is_summed = |module: &str| summed.iter().any(|layer| module.ends_with(layer.as_str()));
        let mut compared = 0;
        for (module, class) in recorded["replaced_modules"].as_object().unwrap() {
            if ours_sums_too(family).iter().any(|own| module.ends_with(own)) {
                continue;
            }
            let named = class == "LinearAllreduce";
            assert_eq!(is_summed(module), named, "{family}: {module} is a {class}");
            for leaf in ["weight", "bias"] {
                let name = format!("{module}.{leaf}");
                let Some(by_rank) = recorded["param_shapes_by_rank"].get(&name) else { continue };
                let param =
                    parameters.iter().find(|param| param.name() == name).unwrap_or_else(|| panic!("{name}"));
                let whole = param.shape().sizes();
                let cut = usize::from(named);
                for rank in 0..2 {
                    let mut own = whole.to_vec();
                    // What is summed over ranks is cut along its inputs, and its bias is added once.
                    if let Some(size) = own.get_mut(cut) {
                        *size = shard_sizes(whole[cut], 2, heads, Some(module))[rank];
                    }
                    assert_eq!(json!(own), by_rank[rank], "{family}: {name} of rank {rank}");
                    compared += 1;
                }
            }
        }
        assert!(compared > 8, "{family}: {compared}");
    });
}

/// What is no multiple of 64 is not lost.
fn ours_gives_the_rest_to_the_last(total: usize, sizes: &mut [usize]) {
    let last = sizes.len() - 1;
    sizes[last] += total - sizes.iter().sum::<usize>();
}

#[test]
fn golden_shard_sizes() {
    let set = golden();
    let Some(recorded) = set.json("inference/tp_shard_sizes.json") else { return };
    let mut cases = Cases::of("inference/tp_shard_sizes.json");
    for row in set.rows("inference/tp_shard_sizes.json", &recorded, "rows") {
        cases.check(row, || {
            let (total, ranks) = (row[1].as_u64().unwrap() as usize, row[2].as_u64().unwrap() as usize);
            let mut expected: Vec<usize> =
                row[4].as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect();
            ours_gives_the_rest_to_the_last(total, &mut expected);
            let heads = row[0].as_u64().map(|heads| heads as usize);
            assert_eq!(shard_sizes(total, ranks, heads, row[3].as_str()), expected);
        });
    }
    cases.finish(&set, 1320);
}

#[test]
fn golden_fused_projections() {
    let set = golden();
    let Some(recorded) = set.json("inference/fused_qkv_sharding.json") else { return };
    let mut cases = Cases::of("inference/fused_qkv_sharding.json");
    for case in recorded.as_array().unwrap() {
        cases.check(format!("{} {}", case["type"], case["mp_size"]), || {
            let number = |key: &str| case[key].as_u64().map(|number| number as usize);
            let expected: Vec<Vec<usize>> = serde_json::from_value(case["rows_by_rank"].clone()).unwrap();
            let (query_rows, heads) = (number("n_embd").unwrap_or(0), number("heads"));
            let rows = number("rows").unwrap_or_else(|| match (heads, number("head_dim")) {
                (Some(heads), Some(dim)) => 3 * heads * dim,
                _ => query_rows + number("kv_rows").unwrap(),
            });
            let class = case["block_class"].as_str().unwrap();
            let kind = FusedQkv::of_block(class, query_rows).unwrap_or(FusedQkv::PerHead);
            assert_eq!(kind.rows(rows, number("mp_size").unwrap(), heads).unwrap(), expected);
        });
    }
    cases.finish(&set, 12);
}

/// The same two functions, recorded a second time with other numbers and another schema.
#[test]
fn golden_shards_of_tensor_parallel_layers() {
    let numbers = |value: &Value| -> Vec<usize> { serde_json::from_value(value.clone()).unwrap() };
    let size = |value: &Value| value.as_u64().map(|number| number as usize);
    golden().each_case("sequence/autotp_shard_sizes.json", 432, |case| {
        let (total, ranks) = (size(&case["total_size"]).unwrap(), size(&case["mp_size"]).unwrap());
        let mut expected = numbers(&case["shards"]);
        ours_gives_the_rest_to_the_last(total, &mut expected);
        let found = shard_sizes(total, ranks, size(&case["num_kv_heads"]), case["layer_name"].as_str());
        assert_eq!(found, expected, "{case}");
    });
    golden().each_case("sequence/autotp_fused_qkv.json", 10, |case| {
        let (class, query_rows) = (case["module"].as_str().unwrap(), size(&case["n_embd"]).unwrap_or(0));
        let kind = FusedQkv::of_block(class, query_rows).unwrap_or(FusedQkv::PerHead);
        let (rows, ranks) = (size(&case["fused_rows"]).unwrap(), size(&case["mp_size"]).unwrap());
        let found = kind.rows(rows, ranks, size(&case["num_kv_heads"])).unwrap();
        let expected: Vec<Vec<usize>> =
            case["rows_per_rank"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!(found, expected, "{case}");
    });
}

#[test]
fn golden_int8_quantizers() {
    let set = golden();
    let Some(path) = set.path("inference/int8_quant.safetensors") else { return };
    let recorded = tensors::read(&path);
    let weight = recorded["weight"].floats();
    let [rows, width] = recorded["weight"].shape[..] else { panic!("{:?}", recorded["weight"].shape) };
    let mut cases = Cases::of("inference/int8_quant.safetensors");
    for name in recorded.keys().filter_map(|name| name.strip_suffix(".q")) {
        cases.check(name, || {
            let number =
                |mark: &str| name.split('.').find_map(|part| part.strip_prefix(mark)?.parse::<usize>().ok());
            let values: Vec<i64> = recorded[&format!("{name}.q")].integers().to_vec();
            let scales = recorded[&format!("{name}.scale")].floats();
            let groups = number("g").unwrap();
            let ours = if name.starts_with("groupquant") {
                let groups = if groups == 0 { rows } else { groups };
                let ours = group_quantizer(weight, groups);
                // A last row that is in neither is left out.
                let half = rows / 2 * width;
                let halves = (&weight[..half], &weight[half..2 * half]);
                // Stored one behind the other, whatever the shape says: of the whole, of the first half, of the second.
                let expected =
                    [ours.scales.clone(), group_scales(halves.0, groups), group_scales(halves.1, groups)];
                assert_close(name, &expected.concat(), scales, 0.0, 1e-6);
                ours
            } else {
                let ours = weight_quantization(weight, number("b").unwrap() as u32, groups);
                assert_close(name, &ours.scales, scales, 0.0, 1e-6);
                ours
            };
            assert_eq!(
                ours.values.iter().map(|&value| i64::from(value)).collect::<Vec<_>>(),
                values,
                "{name}"
            );
        });
    }
    cases.finish(&set, 9);
}
