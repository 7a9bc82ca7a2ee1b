//! GGUF files: what they compute, what they become, and that damaged ones are refused.

use std::path::{Path, PathBuf};

use ferrospeed_models::directory::{WriteOptions, convert};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::pack::pack;
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles, Tokens};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{PackedStore, ParamSource, PlainStore};
use ferrospeed_tensor::{DType, PackedBits, Param, Tensor, autograd};
use ferrospeed_testkit::property::{Random, seeds};
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf")
}

/// Every recorded file, with what transformers computes with its weights (`scripts/peers/gguf_models.py`).
fn cases() -> Vec<(PathBuf, Value)> {
    let entries = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.extension().is_some_and(|ending| ending == "gguf"));
    let cases: Vec<_> = files
        .map(|path| {
            let expected = std::fs::read_to_string(path.with_extension("json")).unwrap();
            (path, serde_json::from_str(&expected).unwrap())
        })
        .collect();
    assert!(cases.len() >= 5, "the recorded files are there");
    cases
}

fn decoder(files: &ModelFiles) -> Decoder {
    let ModelConfig::Decoder(config) = files.model().unwrap() else { panic!("it is a decoder") };
    let model = Decoder::new(*config);
    files.weights().check(model.parameters().as_slice()).unwrap();
    model
}

fn whole(path: &Path) -> Decoder {
    let files = ModelFiles::open(path).unwrap();
    let model = decoder(&files);
    PlainStore::attach(model.parameters().as_slice(), DType::F32, &ferrospeed_cpu::device(), files.weights())
        .unwrap();
    model
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

fn last_logits(model: &Decoder, prompt: &[i64]) -> Vec<f32> {
    let ids = Tensor::from_slice(prompt, [1, prompt.len()], &ferrospeed_cpu::device()).unwrap();
    let logits = autograd::no_grad(|| {
        let hidden = model.hidden(&Tokens::new(ids), None, Mode::Evaluate).unwrap();
        model.logits(&hidden).unwrap().to_vec_f32().unwrap()
    });
    logits[logits.len() - logits.len() / prompt.len()..].to_vec()
}

fn distance(ours: &[f32], theirs: &[f32]) -> f32 {
    let largest = theirs.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn files_compute_what_transformers_computes_with_the_same_weights() {
    for (path, expected) in cases() {
        let model = whole(&path);
        let prompt = numbers(&expected["prompt"]);
        let theirs: Vec<f32> = expected["logits"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value.as_f64().unwrap() as f32)
            .collect();
        let away = distance(&last_logits(&model, &prompt), &theirs);
        assert!(away < 1e-5, "{}: {away}", path.display());
        let options = GenerateOptions {
            max_new_tokens: 12,
            sampling: Sampling::Greedy,
            end_tokens: Vec::new(),
            pad_token: 0,
        };
        let written = generate(
            &model,
            std::slice::from_ref(&prompt),
            None,
            &options,
            &ferrospeed_cpu::device(),
            &mut |_, _| {},
        )
        .unwrap();
        assert_eq!(written[0][prompt.len()..], numbers(&expected["greedy"]), "{}", path.display());
    }
}

#[test]
fn a_converted_directory_computes_what_the_file_computes_to_the_bit() {
    for (path, expected) in cases() {
        let (scratch, prompt) = (tempfile::tempdir().unwrap(), numbers(&expected["prompt"]));
        let target = scratch.path().join("model");
        let options = WriteOptions { dtype: Some(DType::F32), ..Default::default() };
        convert(&path, &target, &options).unwrap();
        assert_eq!(last_logits(&whole(&target), &prompt), last_logits(&whole(&path), &prompt));
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert!(target.join(name).is_file(), "{name}");
        }
    }
}

#[test]
fn blocks_of_eight_and_four_bits_are_held_as_the_file_has_them() {
    for (path, expected) in cases() {
        let files = ModelFiles::open(&path).unwrap();
        let model = decoder(&files);
        let packing_of = |param: &Param| model.packing(param, files.weights().packed(param)?);
        PackedStore::attach(
            model.parameters().as_slice(),
            DType::F32,
            &ferrospeed_cpu::device(),
            files.weights(),
            packing_of,
        )
        .unwrap();
        for param in model.parameters().as_slice() {
            let mut stored = vec![0.0; param.numel()];
            files.weights().load(param, 0..param.numel(), &mut stored).unwrap();
            let held = param.read().unwrap().to_vec_f32().unwrap();
            // Only large blocks are rounded once more, to 254 steps for each 32.
            let rounded = path.ends_with("llama.gguf")
                && ["q_proj", "k_proj", "down_proj"].iter().any(|part| param.name().contains(part));
            if rounded {
                assert!(distance(&held, &stored) < 0.5 / 127.0, "{}", param.name());
            } else {
                assert_eq!(held, stored, "{}", param.name());
            }
        }
        // Products round their rows besides.
        let prompt = numbers(&expected["prompt"]);
        let away = distance(&last_logits(&model, &prompt), &last_logits(&whole(&path), &prompt));
        assert!(away < 0.05, "{}: {away}", path.display());
    }
    let scratch = tempfile::tempdir().unwrap();
    let target = scratch.path().join("packed");
    pack(&folder().join("qwen2.gguf"), &target, PackedBits::Eight, &WriteOptions::default()).unwrap();
    decoder(&ModelFiles::open(&target).unwrap());
}

fn refusal(scratch: &Path, bytes: &[u8]) -> String {
    let path = scratch.join("bad.gguf");
    std::fs::write(&path, bytes).unwrap();
    ModelFiles::open(&path).expect_err("it is refused").to_string()
}

/// Replaces the bytes that follow `after`.
fn patched(whole: &[u8], after: &str, bytes: &[u8]) -> Vec<u8> {
    let place = whole.windows(after.len()).position(|window| window == after.as_bytes()).unwrap();
    let mut changed = whole.to_vec();
    changed[place + after.len()..][..bytes.len()].copy_from_slice(bytes);
    changed
}

#[test]
fn headers_that_lie_are_refused_by_what_they_lie_about() {
    let whole = std::fs::read(folder().join("qwen2.gguf")).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let check = |bytes: &[u8], expected: &str| {
        let found = refusal(scratch.path(), bytes);
        assert!(found.contains(expected), "'{expected}' in: {found}");
    };
    let huge = u64::MAX.to_le_bytes();
    check(b"GGUF", "");
    check(b"GGML\x03\0\0\0", "does not begin with 'GGUF'");
    check(&patched(&whole, "GGUF", &[9]), "version 9");
    check(&patched(&whole, "GGUF\x03\0\0\0", &huge), "announces");
    check(&whole[..whole.len() - 64], "is cut short");
    let tokens = "tokenizer.ggml.tokens\x09\0\0\0\x08\0\0\0";
    check(&patched(&whole, tokens, &huge), "reaches beyond the header");
    check(&patched(&whole, "tokenizer.ggml.tokens\x09\0\0\0", &[9]), "array of arrays");
    check(&patched(&whole, "general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0", b"qwen9"), "'qwen9'");
    // A tensor's dimensions, their sizes, its type and its place follow its name.
    let tensor = "blk.0.attn_q.weight";
    let tail = |type_number: u32, offset: u64| {
        let sizes = [64u64, 64].map(u64::to_le_bytes).concat();
        [&2u32.to_le_bytes()[..], &sizes, &type_number.to_le_bytes(), &offset.to_le_bytes()].concat()
    };
    check(&patched(&whole, tensor, &tail(13, 0)), "has the type Q5_K");
    check(&patched(&whole, tensor, &tail(8, 1)), "no multiple of the alignment 32");
    check(&patched(&whole, tensor, &tail(8, 1 << 40)), "is cut short");
    check(&patched(&whole, tensor, &tail(8, 0)), "overlap");
    check(
        &patched(&whole, tensor, &[&2u32.to_le_bytes()[..], &huge, &huge].concat()),
        "more than can be counted",
    );
    check(&patched(&whole, tensor, &77u32.to_le_bytes()), "77 dimensions");
    check(
        &patched(&whole, "tokenizer.ggml.pre\x08\0\0\0\x05\0\0\0\0\0\0\0", b"gpt-9"),
        "put the model's tokenizer.json",
    );
}

#[test]
fn damaged_files_are_read_or_refused() {
    let (path, scratch) = (folder().join("qwen2.gguf"), tempfile::tempdir().unwrap());
    let whole = std::fs::read(path).unwrap();
    let names = whole.windows(4).rposition(|window| window == b"blk.").unwrap() + 64;
    let file = scratch.path().join("damaged.gguf");
    for seed in seeds(500) {
        let (mut random, mut head) = (Random(seed), whole[..names].to_vec());
        random.damage(&mut head);
        std::fs::write(&file, [&head, &whole[names..]].concat()).unwrap();
        let Ok(files) = ModelFiles::open(&file) else { continue };
        let Ok(ModelConfig::Decoder(config)) = files.model() else { continue };
        let model = Decoder::new(*config);
        if files.weights().check(model.parameters().as_slice()).is_err() {
            continue;
        }
        let _ = PlainStore::attach(
            model.parameters().as_slice(),
            DType::F32,
            &ferrospeed_cpu::device(),
            files.weights(),
        );
    }
}
