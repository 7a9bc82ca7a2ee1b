//! What a recipe is refused with: everything at once, before any rank starts.

use std::path::{Path, PathBuf};

use ferrospeed_train::{Recipe, RunFolder, TrainError, check};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        place.write("text.txt", &"some text to train on\n".repeat(100));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        std::fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    /// The lines that a recipe is refused with; none if it is fine.
    fn problems(&self, recipe: &str, overrides: &[&str]) -> Vec<String> {
        let path = self.write("recipe.toml", &recipe.replace("PLACE", &self.0.path().display().to_string()));
        let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
        let folder = RunFolder::at(self.path("run"));
        let outcome = Recipe::load(&path, &overrides)
            .and_then(|recipe| check(&recipe, &path, &folder, &mut ferrospeed_train::unheard));
        match outcome {
            Ok(_) => Vec::new(),
            Err(TrainError::Recipe { problems, .. }) => problems,
            Err(other) => vec![other.to_string()],
        }
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/golden").join(name)
}

const GOOD: &str = r#"
    name = "good"
    steps = 2
    [model]
    preset = "gpt2"
    layers = 1
    width = 32
    heads = 1
    [data]
    text = ["PLACE/text.txt"]
    sequence = 16
    validation = 0.1
    [ds_config]
    train_micro_batch_size_per_gpu = 2
    optimizer = { type = "AdamW", params = { lr = 1e-3 } }
"#;

fn assert_says(problems: &[String], parts: &[&str]) {
    for part in parts {
        assert!(
            problems.iter().any(|problem| problem.contains(part)),
            "'{part}' is not in:\n{}",
            problems.join("\n")
        );
    }
    assert_eq!(problems.len(), parts.len(), "{}", problems.join("\n"));
}

#[test]
fn a_good_recipe_has_no_problem() {
    assert_says(&Place::new().problems(GOOD, &[]), &[]);
}

#[test]
fn documents_are_together_or_apart_and_end_where_data_says() {
    let place = Place::new();
    assert_says(&place.problems(GOOD, &["data.documents=apart"]), &[]);
    assert_says(&place.problems(GOOD, &["data.documents=together", "model.mlp_chunk=8"]), &[]);
    assert_says(
        &place.problems(GOOD, &["data.documents=both"]),
        &["data.documents: 'both' is not known; use together or apart"],
    );
    assert_says(
        &place.problems(GOOD, &["data.documents=apart", "data.end_token=10"]),
        &["data.end_token: belongs to tokens and megatron; data.text knows where documents end"],
    );
    let numbers: Vec<u8> = (0..100u16).flat_map(|n| (n % 7 + 3).to_le_bytes()).collect();
    std::fs::write(place.path("tokens.bin"), numbers).unwrap();
    let tokens = GOOD.replace("text = [\"PLACE/text.txt\"]", "tokens = [\"PLACE/tokens.bin\"]");
    let tokens = tokens.replace("heads = 1", "heads = 1\n    vocabulary = 256");
    assert_says(
        &place.problems(&tokens, &["data.end_token=5"]),
        &["data.end_token: belongs to data.documents = \"apart\""],
    );
    assert_says(&place.problems(&tokens, &["data.documents=apart"]), &["where documents end is not known"]);
    assert_says(&place.problems(&tokens, &["data.documents=apart", "data.end_token=5"]), &[]);
}

#[test]
fn a_misspelt_override_is_told_the_key_it_was_meant_for() {
    let place = Place::new();
    assert_says(&place.problems(GOOD, &["stpes=3"]), &["--set stpes=3: 'stpes' is a key neither of recipes"]);
    assert_says(&place.problems(GOOD, &["stpes=3"]), &["did you mean 'steps'?"]);
    assert_says(&place.problems(GOOD, &["modle.layers=3"]), &["did you mean 'model'?"]);
    // Names that are near to keys of ds_config are told those.
    assert_says(
        &place.problems(GOOD, &["zero_optimisation.stage=3"]),
        &["did you mean `zero_optimization`?"],
    );
    assert_says(&place.problems(GOOD, &["steps_per_print=3", "model.layers=2"]), &[]);
}

#[test]
fn unknown_keys_wrong_types_missing_files_and_misfits_are_told_together() {
    let recipe = r#"
        name = "bad name"
        stpes = 2
        seed = "seven"
        [model]
        preset = "gpt2"
        layers = 2.5
        vocabulary = 100
        heads = [1]
        [data]
        jsonl = ["PLACE/text.txt", "PLACE/missing.jsonl", "PLACE/gone.jsonl"]
        sequenc = 16
        sequence = 1
        [eval]
        every = -3
        [sample]
        tokens = 5
        [ds_config]
        train_micro_batch_size_per_gpu = 2
        zero_optimization = { stage = 2, stge = 1 }
    "#;
    assert_says(
        &Place::new().problems(recipe, &[]),
        &[
            "stpes: is not a key of recipes; did you mean 'steps'?",
            "steps: is missing; give it, or epochs",
            "seed: must be a whole number, 0 or more; \"seven\" is a text",
            "model.layers: must be a whole number, 0 or more; 2.5 is a number with a fraction",
            "model.heads: must be a whole number, 0 or more; [1] is a list",
            "data.sequenc: is not a key of recipes; did you mean 'data.sequence'?",
            "eval.every: must be a whole number, 0 or more; -3 is negative",
            "sample.prompt: is missing",
            "name: 'bad name' must be letters",
            "data.sequence: 1 is too short",
            "stge",
            "model: a vocabulary of 100 does not hold the 256 tokens of bytes",
            "missing.jsonl does not exist",
            "gone.jsonl does not exist",
        ],
    );
}

#[test]
fn a_model_and_data_that_do_not_fit_are_told_together() {
    let place = Place::new();
    let tokenizer = format!("data.tokenizer={}", golden("tokenizer.json").display());
    let problems = place.problems(GOOD, &[&tokenizer, "model.vocabulary=300"]);
    assert_says(&problems, &["model: a vocabulary of 300 does not hold the 320 tokens of"]);
    let config = r#"{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 32,
        "n_layer": 1, "n_head": 1, "n_positions": 8}"#;
    let file = place.write("config.json", config);
    let model = format!("model={{\"config\": {:?}}}", file.display());
    let problems = place.problems(GOOD, &[&model, "data.sequence=9"]);
    let expected = [
        "a model of 50257 tokens does not read bytes",
        "data.sequence: 9 is longer than the model's 8 positions",
    ];
    assert_says(&problems, &expected);
    assert_says(&place.problems(GOOD, &[&model, "data.sequence=8", "data.tokenizer=bytes"]), &[]);
}

#[test]
fn tokens_outside_the_vocabulary_are_told_with_their_place() {
    let place = Place::new();
    let tokens = |kind: &str| {
        format!(
            "data={{\"tokens\": [{:?}], \"token_type\": \"{kind}\", \"sequence\": 16}}",
            golden("tokens-u16.bin").display()
        )
    };
    assert_says(&place.problems(GOOD, &[&tokens("u16"), "model.vocabulary=320"]), &[]);
    let problems = place.problems(GOOD, &[&tokens("u16"), "model.vocabulary=200"]);
    assert_says(&problems, &["tokens-u16.bin: token "]);
    assert!(problems[0].contains("does not fit a vocabulary of 200"), "{problems:?}");
    let problems = place.problems(GOOD, &[&tokens("u32"), "model.vocabulary=320"]);
    assert_says(&problems, &["tokens-u16.bin: token 0 (byte 0): token "]);
    assert_says(&place.problems(GOOD, &[&tokens("u16")]), &["model.vocabulary: must be given"]);
    assert_says(
        &place.problems(GOOD, &[&tokens("f16"), "model.vocabulary=320"]),
        &["data.token_type: 'f16' is not known"],
    );
}

#[test]
fn kinds_of_data_do_not_mix() {
    let place = Place::new();
    let data = |text: &str| format!("data={{\"sequence\": 16, {text}}}");
    for (text, problem) in [
        (
            r#""validation": 0.1"#,
            "data: give one of text, jsonl, parquet, samples, hub, tokens, megatron and synthetic; there is none",
        ),
        (r#""synthetic": 1000, "text": ["x"]"#, "there are text and synthetic"),
        (r#""jsonl": []"#, "data.jsonl: names no file or folder"),
        (r#""synthetic": 1000, "field": "a""#, "data.field: belongs to data.jsonl, not to data.synthetic"),
        (r#""synthetic": 1000, "cache": "a""#, "data.cache: belongs to text, jsonl, parquet and samples"),
        (r#""synthetic": 1000, "validation": ["a"]"#, "data.validation: synthetic data has no files"),
        (r#""synthetic": 1000, "validation": 1.5"#, "data.validation: 1.5 is not a share"),
        (r#""synthetic": 10"#, "data: 10 tokens do not make a sequence of 16 tokens"),
    ] {
        assert_says(&place.problems(GOOD, &[&data(text)]), &[problem]);
    }
    let sample = "sample={\"prompt\": \"x\", \"tokens\": 3}";
    let problems = place.problems(GOOD, &[&data("\"synthetic\": 1000"), sample]);
    assert_says(&problems, &["sample: tokens are no text"]);
}

#[test]
fn every_golden_kind_of_data_is_accepted() {
    let place = Place::new();
    let (tokenizer, validation) = (golden("tokenizer.json"), golden("texts.jsonl"));
    for (kind, file, more) in [
        ("jsonl", "texts.jsonl", format!("\"tokenizer\": {tokenizer:?}")),
        ("jsonl", "texts.jsonl", format!("\"validation\": [{validation:?}]")),
        ("parquet", "texts-snappy.parquet", "\"validation\": 0.2".into()),
        ("megatron", "megatron-u16", format!("\"tokenizer\": {tokenizer:?}")),
        ("tokens", "tokens-u16.bin", "\"validation\": 0.5".into()),
    ] {
        let data = format!("data={{\"{kind}\": [{:?}], \"sequence\": 16, {more}}}", golden(file));
        assert_says(&place.problems(GOOD, &[&data, "model.vocabulary=500"]), &[]);
    }
}

#[test]
fn damaged_data_is_told_with_its_place() {
    let place = Place::new();
    let file = place.write("bad.jsonl", "{\"text\": \"fine\"}\n{\"text\": 7}\n");
    let data = format!("data={{\"jsonl\": [{:?}], \"sequence\": 16}}", file);
    assert_says(&place.problems(GOOD, &[&data]), &["bad.jsonl: line 2 (byte 27): invalid type: integer `7`"]);
    assert_says(
        &place.problems(GOOD, &[&data, "steps=0"]),
        &["bad.jsonl: line 2", "steps: must be at least 1"],
    );
}

#[test]
fn overrides_reach_the_recipe_and_the_ds_config_alike() {
    let place = Place::new();
    let path = place.write("recipe.toml", GOOD);
    let overrides = ["steps=8", "model.layers=4", "zero_optimization.stage=3", "ds_config.bf16.enabled=true"];
    let recipe = Recipe::load(&path, &overrides.map(str::to_owned)).unwrap();
    assert_eq!((recipe.steps, recipe.model.layers), (8, Some(4)));
    let (config, _) = recipe.config().unwrap();
    assert_eq!(config.zero.stage.number(), 3);
    assert_eq!(recipe.ds_config["bf16"]["enabled"], true);
}

#[test]
fn overrides_of_sections_that_recipes_may_have_hold_wherever_the_section_is() {
    let place = Place::new();
    let sections =
        [("pipeline", "stages"), ("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")];
    for (section, key) in sections {
        let set = format!("{section}.{key}=3");
        let of_recipe = format!("{GOOD}\n[{section}]\n{key} = 2\n");
        let of_config = format!("{GOOD}\n{section} = {{ {key} = 2 }}\n");
        for recipe in [GOOD, &of_recipe, &of_config] {
            let path = place.write("recipe.toml", recipe);
            let recipe = Recipe::load(&path, std::slice::from_ref(&set)).unwrap();
            assert_eq!(recipe.ds_config[section][key], 3, "{set}");
            assert!(!recipe.problems().iter().any(|problem| problem.contains("contradicts")), "{set}");
        }
        let problems = place.problems(&of_config, &[&format!("{section}=3")]);
        assert!(problems.iter().any(|problem| problem.contains(section)), "{problems:?}");
    }
}

#[test]
fn axes_that_ranks_cannot_be_laid_out_for_are_refused() {
    let place = Place::new();
    let problems = place.problems(
        GOOD,
        &["ranks=6", "tensor_parallel.autotp_size=4", "sequence_parallel_size=2", "pipeline.stages=3"],
    );
    let all = "pipeline.stages, sequence_parallel_size, tensor_parallel.autotp_size: 3 stages × 2 parts of a sequence × 4 slices of a layer need a multiple of 24 ranks, and there are 6; start 24 (-n, ranks), or change the others";
    let told: Vec<_> = problems.iter().filter(|line| line.contains("multiple of")).collect();
    assert_eq!(told, [all], "{problems:?}");
    let twice =
        format!("{GOOD}\ntensor_parallel = {{ autotp_size = 2 }}\n[tensor_parallel]\nautotp_size = 4\n");
    let problems = place.problems(&twice, &["ranks=4"]);
    assert!(
        problems.iter().any(|line| line.contains("4 contradicts ds_config's tensor_parallel")),
        "{problems:?}"
    );
}
