//! Parameters stand in the order in which transformers lists them: DeepSpeed's flat partitions know them by their place alone.

use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_testkit::golden::{read_json, repository_root};
use serde_json::Value;

/// A parameter's name and shape.
type Listed = (String, Vec<u64>);

fn ours(config: &Value) -> Vec<Listed> {
    let model = ModelConfig::from_value(config, WindowRule::default()).unwrap();
    let shape = |sizes: &[usize]| sizes.iter().map(|&size| size as u64).collect();
    let parameters = model.parameters();
    parameters
        .as_slice()
        .iter()
        .map(|param| (param.name().to_owned(), shape(param.shape().sizes())))
        .collect()
}

fn recorded(in_order: &Value) -> Vec<Listed> {
    let listed = |entry: &Value| {
        let shape = entry[1].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).collect();
        (entry[0].as_str().unwrap().to_owned(), shape)
    };
    in_order.as_array().unwrap().iter().map(listed).collect()
}

/// In the memory of transformers 5 a mixture's experts are stacked, and GPT-NeoX's head has the name of all heads. Its files
/// keep the names of 4, and so do we.
fn stacked(parameters: Vec<Listed>) -> Vec<Listed> {
    let mut all: Vec<Listed> = Vec::new();
    for (name, shape) in parameters {
        let name = name.replace(".block_sparse_moe.", ".mlp.");
        let name = if name == "embed_out.weight" { "lm_head.weight".into() } else { name };
        let Some((place, expert)) = name.split_once(".experts.") else {
            all.push((name, shape));
            continue;
        };
        let is_one_of =
            |names: [&str; 2]| names.iter().any(|name| expert.ends_with(&format!("{name}.weight")));
        let (stack, rows) = match is_one_of(["w2", "down_proj"]) {
            true => ("down_proj", shape[0]),
            false => ("gate_up_proj", 2 * shape[0]),
        };
        let stack = format!("{place}.experts.{stack}");
        match all.iter_mut().find(|(known, _)| *known == stack) {
            Some((_, known)) if is_one_of(["w1", "gate_proj"]) || stack.ends_with("down_proj") => {
                known[0] += 1
            }
            Some(_) => {}
            None => all.push((stack, vec![1, rows, shape[1]])),
        }
    }
    all
}

fn check(version: &str, seen_as: fn(Vec<Listed>) -> Vec<Listed>) {
    let path = repository_root().join(format!("tests/golden/transformers/parameters/{version}.json"));
    let models = read_json(&path);
    let models = models.as_object().unwrap();
    assert!(models.len() > 20, "all families are recorded");
    for (name, model) in models {
        assert_eq!(seen_as(ours(&model["config"])), recorded(&model["in_order"]), "{name} in {version}");
    }
}

#[test]
fn parameters_stand_in_the_order_of_transformers_4() {
    check("4.40", |parameters| parameters);
}

#[test]
fn parameters_stand_in_the_order_of_transformers_5() {
    check("5.22", stacked);
}

#[test]
fn files_of_both_versions_hold_the_same_names_and_they_are_ours() {
    let folder = repository_root().join("tests/golden/transformers/parameters");
    let [old, new] = ["4.40", "5.22"].map(|version| read_json(&folder.join(format!("{version}.json"))));
    for (name, model) in new.as_object().unwrap() {
        // Some families are younger than 4.40.
        assert!(old.get(name).is_none_or(|old| model["in_file"] == old["in_file"]), "{name}");
        let mut names: Vec<String> = ours(&model["config"]).into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(serde_json::json!(names), model["in_file"], "{name}");
    }
}
