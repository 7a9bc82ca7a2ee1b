//! `ferrospeed model` on real directories, sound and hostile.

use ferrospeed_testkit::child;
use std::path::{Path, PathBuf};

use super::support::{ferrospeed, stderr, stdout};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

/// Runs `ferrospeed model …` and expects it to succeed.
fn model(arguments: &[&str]) -> String {
    let output = ferrospeed(&[&["model"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

/// Runs `ferrospeed model …` and expects it to refuse with exit code 2.
fn refused(arguments: &[&str]) -> String {
    let output = ferrospeed(&[&["model"], arguments].concat());
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}{}", stdout(&output), stderr(&output));
    stderr(&output)
}

/// A new tiny GPT-2 in a folder of its own.
fn tiny() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("tiny");
    model(&["init", text(&place), "--preset", "gpt2", "--layers", "2", "--width", "64", "--sequence", "32"]);
    (folder, place)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Takes a safetensors file apart: its header and its data.
fn parts_of(path: &Path) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

fn write_parts(path: &Path, header: &Value, data: &[u8]) {
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    std::fs::write(path, bytes).unwrap();
}

/// Every tensor's type, shape and bytes, wherever it lies.
fn tensors_of(directory: &Path) -> Vec<(String, Value, Value, Vec<u8>)> {
    let mut tensors = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let (header, data) = parts_of(&path);
            for (name, entry) in
                header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__")
            {
                let place = |end: usize| entry["data_offsets"][end].as_u64().unwrap() as usize;
                let bytes = data[place(0)..place(1)].to_vec();
                tensors.push((name.clone(), entry["dtype"].clone(), entry["shape"].clone(), bytes));
            }
        }
    }
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

#[test]
fn inspect_says_what_a_model_is_and_what_it_takes() {
    let (_folder, place) = tiny();
    let report: Value = serde_json::from_str(&model(&["inspect", text(&place), "--json"])).unwrap();
    // Two blocks of 12·64² weights and 13·64 biases and norms, 256 + 32 rows of 64, a final norm.
    let parameters = 2 * (12 * 64 * 64 + 13 * 64) + (256 + 32) * 64 + 2 * 64;
    assert_eq!(report["parameters"], parameters);
    assert_eq!(report["groups"]["embedding"]["parameters"], (256 + 32) * 64);
    assert_eq!(report["groups"]["attention"]["parameters"], 2 * (4 * 64 * 64 + 4 * 64));
    assert_eq!(report["groups"]["feed-forward"]["parameters"], 2 * (8 * 64 * 64 + 5 * 64));
    assert_eq!(report["groups"]["norms"]["parameters"], 5 * 2 * 64);
    assert_eq!(report["weights"]["bytes_by_dtype"]["float32"], 4 * parameters);
    // Parameter, gradient and two moments, four bytes each.
    assert_eq!(report["to_train"][0]["model_state_bytes"], 16 * parameters);
    assert_eq!(report["to_serve"][1]["weight_bytes"], 2 * parameters);
    assert_eq!(report["to_serve"][1]["cache_bytes"], 2 * 2 * 64 * 32 * 2);

    let people = model(&["inspect", text(&place)]);
    for part in [
        "gpt2 (GPT2LMHeadModel): 2 layers, width 64",
        "118,528",
        "feed-forward",
        "to train 1 × 32",
        "to serve",
    ] {
        assert!(people.contains(part), "{part} is not in\n{people}");
    }
}

#[test]
fn every_recorded_family_is_inspected_and_its_roles_add_up() {
    let set = ferrospeed_testkit::golden::golden();
    set.each_path("models", set.models_with("config.json"), 43, |folder| {
        let report: Value = serde_json::from_str(&model(&["inspect", text(folder), "--json"])).unwrap();
        let groups = report["groups"].as_object().unwrap();
        let sum: u64 = groups.values().map(|group| group["parameters"].as_u64().unwrap()).sum();
        assert_eq!(report["parameters"], sum);
        // The planner counts the same parameters without building the model.
        assert_eq!(report["to_serve"][0]["weight_bytes"], 4 * sum, "{}", folder.display());
        for role in ["embedding", "attention", "norms"] {
            assert!(groups.contains_key(role), "{}: {role}", folder.display());
        }
        let feeds = ["feed-forward", "experts"].iter().filter(|role| groups.contains_key(**role)).count();
        assert_eq!(feeds, 1, "{}: {groups:?}", folder.display());
        assert_eq!(groups.contains_key("experts"), groups.contains_key("router"), "{}", folder.display());
    });
}

#[test]
fn a_directory_without_weights_is_inspected_by_its_config() {
    let (_folder, place) = tiny();
    std::fs::remove_file(place.join("model.safetensors")).unwrap();
    assert!(model(&["inspect", text(&place)]).contains("weights: none"));
}

#[test]
fn convert_there_and_back_gives_the_same_bytes_and_brings_the_tokenizer() {
    let (folder, place) = tiny();
    std::fs::write(place.join("tokenizer.json"), "{\"any\": 1}").unwrap();
    std::fs::write(place.join("pytorch_model.bin"), "old weights").unwrap();
    let sharded = folder.path().join("sharded");
    model(&["convert", text(&place), text(&sharded), "--max_shard_size", "100KB"]);
    assert!(sharded.join("model.safetensors.index.json").is_file());
    assert!(std::fs::read_dir(&sharded).unwrap().count() > 4);
    assert_eq!(std::fs::read(sharded.join("tokenizer.json")).unwrap(), b"{\"any\": 1}");
    assert!(!sharded.join("pytorch_model.bin").exists(), "weights of other formats stay behind");
    assert_eq!(tensors_of(&sharded), tensors_of(&place));
    let whole = folder.path().join("whole");
    model(&["convert", text(&sharded), text(&whole)]);
    assert_eq!(
        std::fs::read(whole.join("model.safetensors")).unwrap(),
        std::fs::read(place.join("model.safetensors")).unwrap()
    );
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 3, "nothing else is left beside the directories");
}

#[test]
fn convert_rounds_to_nearest_and_says_so_in_the_config() {
    let (folder, place) = tiny();
    let narrow = folder.path().join("narrow");
    model(&["convert", text(&place), text(&narrow), "--dtype", "bfloat16"]);
    assert_eq!(json_of(&narrow.join("config.json"))["torch_dtype"], "bfloat16");
    for (wide, narrow) in tensors_of(&place).iter().zip(tensors_of(&narrow)) {
        assert_eq!((&wide.0, &wide.2, &narrow.1), (&narrow.0, &narrow.2, &json!("BF16")));
        for (wide, narrow) in wide.3.chunks_exact(4).zip(narrow.3.chunks_exact(2)) {
            let bits = u32::from_le_bytes(wide.try_into().unwrap());
            // Round to nearest, ties to even: add half of the last place, and its own last bit.
            let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            assert_eq!(u16::from_le_bytes(narrow.try_into().unwrap()), rounded as u16);
        }
    }
    // What is already narrow comes back exactly.
    let (wide, again) = (folder.path().join("wide"), folder.path().join("again"));
    model(&["convert", text(&narrow), text(&wide), "--dtype", "float32"]);
    model(&["convert", text(&wide), text(&again), "--dtype", "bfloat16"]);
    assert_eq!(tensors_of(&again), tensors_of(&narrow));
}

#[test]
fn packed_weights_are_called_by_their_bits_and_become_whole_where_a_type_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let families =
        ["llama", "gpt2"].into_iter().flat_map(|family| ["int8", "int4", "fp8"].map(|bits| (family, bits)));
    for (family, bits) in families {
        let place = folder.path().join(family);
        if !place.exists() {
            let sizes = ["--layers", "1", "--width", "64", "--sequence", "32"];
            model(&[&["init", text(&place), "--preset", family][..], &sizes].concat());
        }
        let at = |name: &str| folder.path().join(format!("{family}-{bits}-{name}"));
        let [packed, copied, whole] = ["packed", "copied", "whole"].map(at);
        model(&["convert", text(&place), text(&packed), "--quantize", bits]);
        let said = model(&["inspect", text(&packed)]);
        assert!(said.contains(&format!(" of {bits}")) && !said.contains("uint8"), "{said}");
        // Without a type it is copied as it is.
        model(&["convert", text(&packed), text(&copied)]);
        assert_eq!(tensors_of(&copied), tensors_of(&packed));
        model(&["convert", text(&packed), text(&whole), "--dtype", "bfloat16"]);
        let names = |tensors: &[(String, Value, Value, Vec<u8>)]| {
            tensors.iter().map(|(name, ..)| name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&tensors_of(&whole)), names(&tensors_of(&place)), "{family} {bits}");
        assert!(tensors_of(&whole).iter().all(|(_, dtype, ..)| dtype == "BF16"), "{family} {bits}");
    }
}

#[test]
fn a_value_that_the_new_type_cannot_hold_is_named_and_nothing_is_left() {
    let (folder, place) = tiny();
    let file = place.join("model.safetensors");
    let (header, mut data) = parts_of(&file);
    let start = header["transformer.wte.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    data[start..start + 4].copy_from_slice(&1e6f32.to_le_bytes());
    write_parts(&file, &header, &data);
    let narrow = folder.path().join("narrow");
    let message = refused(&["convert", text(&place), text(&narrow), "--dtype", "float16"]);
    assert!(message.contains("'transformer.wte.weight' holds 1000000"), "{message}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "only the source is there");
}

#[test]
fn an_occupied_target_is_left_alone() {
    let (folder, place) = tiny();
    let message = refused(&["convert", text(&place), text(&place)]);
    assert!(message.contains("is already there"), "{message}");
    let file = folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    assert!(refused(&["init", text(&file), "--preset", "llama"]).contains("is already there"));
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn init_repeats_itself_by_seed_and_takes_configs_and_presets() {
    let (folder, place) = tiny();
    let [same, other, llama] = ["same", "other", "llama"].map(|name| folder.path().join(name));
    let config = place.join("config.json");
    model(&["init", text(&same), "--config", text(&config)]);
    model(&["init", text(&other), "--config", text(&place), "--seed", "7"]);
    assert_eq!(tensors_of(&same), tensors_of(&place));
    assert_ne!(tensors_of(&other), tensors_of(&place));
    model(&[
        "init",
        text(&llama),
        "--preset",
        "llama",
        "--width",
        "64",
        "--layers",
        "1",
        "--dtype",
        "float16",
    ]);
    assert_eq!(json_of(&llama.join("config.json"))["torch_dtype"], "float16");
    // A model of bytes can speak at once.
    let spoken = ferrospeed(&["generate", "--model", text(&llama), "--prompt", "a", "--tokens", "3"]);
    assert_eq!(spoken.status.code(), Some(0), "{}", stderr(&spoken));

    let nowhere = folder.path().join("nowhere");
    assert!(refused(&["init", text(&nowhere)]).contains("--preset"));
    assert!(
        refused(&["init", text(&nowhere), "--config", text(&config), "--layers", "2"]).contains("--layers")
    );
    assert!(
        refused(&["init", text(&nowhere), "--preset", "gpt2", "--width", "65", "--heads", "2"])
            .contains("heads")
    );
    assert!(refused(&["init", text(&nowhere), "--preset", "gpt2", "--dropout", "1.5"]).contains("--dropout"));
    assert!(!nowhere.exists());
}

#[test]
fn what_is_no_model_is_told_with_what_it_may_be() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    let made = ["init", "--preset", "gpt2", "--layers", "1", "--width", "64", "--heads", "2"];
    model(&[&made[..], &[&at("run/model")]].concat());
    for folder in ["run/checkpoints", "going/checkpoints/global_step2", "piped", "other"] {
        std::fs::create_dir_all(at(folder)).unwrap();
    }
    std::fs::write(at("going/checkpoints/global_step2/manifest.json"), "{}").unwrap();
    std::fs::copy(at("run/model/config.json"), at("piped/config.json")).unwrap();
    nix::unistd::mkfifo(at("piped/model.safetensors").as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    // The folder of a run stands for its model.
    let run = at("run");
    let said = ferrospeed(&["generate", "--prompt", "x", "--tokens", "1", "--model", &run]);
    assert!(said.status.success(), "{}", stderr(&said));
    for (given, why) in [
        ("going", "`ferrospeed checkpoint export-hf` makes a model"),
        ("going/checkpoints/global_step2", "`ferrospeed checkpoint export-hf` makes a model"),
        ("other", "is no model: it has no config.json"),
        ("piped", "'model.safetensors' is no plain file"),
    ] {
        let given = at(given);
        for words in
            [&["generate", "--prompt", "x", "--model", &given][..], &["serve", &given], &["chat", &given]]
        {
            let refused = ferrospeed(words);
            assert_eq!(refused.status.code(), Some(2), "{words:?}: {}", stderr(&refused));
            assert!(stderr(&refused).contains(why), "{words:?}: {}", stderr(&refused));
        }
    }
}

#[test]
fn a_tokenizer_that_is_none_or_anothers_is_told() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    let made = ["init", "--preset", "gpt2", "--layers", "1", "--width", "64", "--heads", "2"];
    model(&[&made[..], &[&at("model")]].concat());
    let file = at("model/tokenizer.json");
    let words = |vocabulary: &str, rest: &str| {
        format!("{{\"version\": \"1.0\", \"model\": {{\"vocab\": {vocabulary}, {rest}}}}}")
    };
    let generate = || ferrospeed(&["generate", "--model", &at("model"), "--prompt", "x", "--tokens", "2"]);
    nix::unistd::mkfifo(file.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let told = stderr(&generate());
    assert!(told.contains("tokenizer.json") && told.contains("a pipe"), "{told}");
    std::fs::remove_file(&file).unwrap();
    for (text, why) in [
        (words("{}", "\"type\": \"BPE\", \"merges\": []"), "makes no token of it"),
        (
            words("{\"x\": 5000, \"y\": 1}", "\"type\": \"WordLevel\", \"unk_token\": \"y\""),
            "the tokenizer is another model's: it gives the token 5000, and this one has 256",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let refused = generate();
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
    }
}

#[test]
fn damaged_files_are_refused_by_name_and_reason() {
    let (_folder, place) = tiny();
    let file = place.join("model.safetensors");
    let (header, data) = parts_of(&file);
    let whole = std::fs::read(&file).unwrap();
    let expect = |reason: &str| {
        for command in ["inspect", "convert"] {
            let target = place.with_file_name("converted");
            let mut arguments = vec![command, text(&place)];
            arguments.extend((command == "convert").then(|| text(&target)));
            let message = refused(&arguments);
            assert!(message.contains("model.safetensors"), "{command}: {message}");
            assert!(message.contains(reason), "{command}: {reason} is not in {message}");
            assert!(!target.exists());
        }
    };
    for length in [whole.len() - 1, whole.len() / 2, 100] {
        std::fs::write(&file, &whole[..length]).unwrap();
        expect("is cut short");
    }
    std::fs::write(&file, &whole[..5]).unwrap();
    expect("it has 5 bytes");
    std::fs::write(&file, [&whole[..], b"more"].concat()).unwrap();
    expect("bytes that belong to no tensor");
    // A header that announces more than any file has, then one that is not JSON.
    std::fs::write(&file, [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
    expect("announces a header of 18446744073709551615 bytes");
    std::fs::write(&file, [&9u64.to_le_bytes()[..], b"{\"a\": [[[", &data].concat()).unwrap();
    expect("bad safetensors header");

    // Ranges that overlap, leave a hole, run backwards or do not fit their shape.
    let with = |name: &str, key: &str, value: Value| {
        let mut header = header.clone();
        header[name][key] = value;
        write_parts(&file, &header, &data);
    };
    let wte = "transformer.wte.weight";
    let [start, end] = [0, 1].map(|side| header[wte]["data_offsets"][side].as_u64().unwrap());
    with(wte, "data_offsets", json!([start - 64, end - 64]));
    expect("bad safetensors header");
    with(wte, "data_offsets", json!([start + 64, end + 64]));
    expect("bad safetensors header");
    with(wte, "data_offsets", json!([end, start]));
    expect("bad safetensors header");
    with(wte, "shape", json!([256, 65]));
    expect("bad safetensors header");
    with(wte, "shape", json!([u64::MAX, u64::MAX]));
    expect("bad safetensors header");
    with(wte, "dtype", json!("F4_E9"));
    expect("bad safetensors header");
    // A tensor that is named twice may be either.
    let twice = header.to_string().replacen('{', &format!("{{\"{wte}\": {}, ", header[wte]), 1);
    std::fs::write(&file, [&(twice.len() as u64).to_le_bytes()[..], twice.as_bytes(), &data].concat())
        .unwrap();
    expect("stands twice");
}

#[test]
fn what_does_not_fit_the_model_is_listed_as_one_table() {
    let (_folder, place) = tiny();
    let file = place.join("model.safetensors");
    let (mut header, data) = parts_of(&file);
    let entries = header.as_object_mut().unwrap();
    let renamed = entries.remove("transformer.ln_f.weight").unwrap();
    entries.insert("transformer.ln_g.weight".into(), renamed);
    entries["transformer.wpe.weight"]["shape"] = json!([64, 32]);
    entries["transformer.h.0.ln_1.weight"]["dtype"] = json!("I32");
    write_parts(&file, &header, &data);
    let message = refused(&["inspect", text(&place)]);
    let table: Vec<&str> = message.lines().skip(1).collect();
    assert_eq!(
        table,
        [
            "  wrong shape transformer.wpe.weight is [64, 32], expected [32, 64]",
            "  wrong type  transformer.h.0.ln_1.weight is i32, expected a float type",
            "  missing     transformer.ln_f.weight [64]",
            "  unknown     transformer.ln_g.weight [64]",
        ],
        "{message}"
    );

    // Not a line for each of so many.
    let entries = header.as_object_mut().unwrap();
    for number in 0..100_000 {
        entries.insert(
            format!("more.{number:06}"),
            json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        );
    }
    write_parts(&file, &header, &data);
    let message = refused(&["inspect", text(&place)]);
    assert!(message.contains("  unknown     more.000000 [0]"), "{}", &message[..200]);
    assert!(message.ends_with("  unknown     and 99801 more\n"), "{}", &message[message.len() - 200..]);
    assert_eq!(message.lines().count(), 1 + 3 + 200 + 1);
}

#[test]
fn a_stored_head_that_the_configuration_ties_to_the_embedding_is_told_where_it_is_another() {
    let (_folder, place) = tiny();
    let file = place.join("model.safetensors");
    let (mut header, mut data) = parts_of(&file);
    let embedding = header["transformer.wte.weight"].clone();
    let place_of = |end: usize| embedding["data_offsets"][end].as_u64().unwrap() as usize;
    let (start, end) = (data.len(), data.len() + place_of(1) - place_of(0));
    data.extend_from_within(place_of(0)..place_of(1));
    let mut head = embedding.clone();
    head["data_offsets"] = json!([start, end]);
    header["lm_head.weight"] = head;
    write_parts(&file, &header, &data);
    // A copy of the embedding says nothing new.
    let said = || stderr(&ferrospeed(&["model", "inspect", text(&place)]));
    assert_eq!(said(), "");
    let last = data.len() - 1;
    data[last] ^= 0x40;
    write_parts(&file, &header, &data);
    let said = said();
    assert!(said.contains("'lm_head.weight' is in the files and is not the embedding"), "{said}");
    assert_eq!(said.trim().lines().count(), 1, "{said}");
}

#[test]
fn an_index_that_lies_is_refused() {
    let (folder, place) = tiny();
    let sharded = folder.path().join("sharded");
    model(&["convert", text(&place), text(&sharded), "--max_shard_size", "100KB"]);
    let path = sharded.join("model.safetensors.index.json");
    let index = json_of(&path);
    let first = index["weight_map"]["transformer.wte.weight"].clone();
    let with = |tensor: &str, file: Value| {
        let mut index = index.clone();
        index["weight_map"][tensor] = file;
        std::fs::write(&path, index.to_string()).unwrap();
        refused(&["inspect", text(&sharded)])
    };
    assert!(with("transformer.wte.weight", json!("../../etc/passwd")).contains("is not a file name"));
    assert!(with("transformer.wte.weight", json!(7)).contains("is not a file name"));
    assert!(with("transformer.other", first).contains("where the index says it is"));
    assert!(with("transformer.wte.weight", json!("gone.safetensors")).contains("gone.safetensors"));
    std::fs::write(&path, "{}").unwrap();
    assert!(refused(&["inspect", text(&sharded)]).contains("weight_map"));
}

#[test]
fn unknown_models_and_rotary_kinds_are_refused_with_what_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    let refused_config = |value: Value| {
        std::fs::write(&config, value.to_string()).unwrap();
        refused(&["inspect", text(folder.path())])
    };
    let message = refused_config(json!({"model_type": "rwkv"}));
    assert!(message.contains("'rwkv' is not supported; one of gpt2, llama"), "{message}");
    let message =
        refused_config(json!({"model_type": "llama", "rope_scaling": {"rope_type": "mrope", "factor": 2}}));
    assert!(
        message.contains("rope_scaling.rope_type: 'mrope' is not supported; default, linear"),
        "{message}"
    );
    assert!(refused_config(json!({})).contains("model_type: is missing"));
    assert!(refused_config(json!([])).contains("must be a JSON object"));
    std::fs::write(&config, "{").unwrap();
    assert!(refused(&["inspect", text(folder.path())]).contains("config.json"));
    std::fs::remove_file(&config).unwrap();
    assert!(refused(&["inspect", text(folder.path())]).contains("config.json"));
}

/// 120 MB of weights pass through the commands; no process may hold half of them at any time.
#[test]
fn large_models_stream() {
    if !child::has_process_alone(module_path!(), "large_models_stream") {
        return;
    }
    const LIMIT_BYTES: u64 = 56 << 20;
    let folder = tempfile::tempdir().unwrap();
    let [wide, narrow] = ["wide", "narrow"].map(|name| folder.path().join(name));
    model(&[
        "init",
        text(&wide),
        "--preset",
        "llama",
        "--width",
        "512",
        "--layers",
        "10",
        "--max_shard_size",
        "30MB",
    ]);
    model(&["inspect", text(&wide)]);
    model(&["convert", text(&wide), text(&narrow), "--dtype", "bfloat16", "--max_shard_size", "1GB"]);
    let report: Value = serde_json::from_str(&model(&["inspect", text(&narrow), "--json"])).unwrap();
    assert!(report["parameters"].as_u64().unwrap() > 30_000_000, "the model is large: {report}");
    // The most that any process started by this test binary ever held.
    let peak_kib = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss() as u64;
    assert!(peak_kib << 10 < LIMIT_BYTES, "a command held {peak_kib} KiB");
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_leaves_nothing() {
    let (folder, place) = tiny();
    let copy = folder.path().join("copy");
    let limited = std::process::Command::new("bash")
        .args(["-c", "ulimit -f 16; exec \"$@\"", "bash", env!("CARGO_BIN_EXE_ferrospeed")])
        .args(["model", "convert", text(&place), text(&copy)])
        .output()
        .unwrap();
    assert_eq!(limited.status.code(), Some(1), "{limited:?}");
    assert!(stderr(&limited).contains("File too large"), "{}", stderr(&limited));
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["tiny"]);
}
