//! Elastic batch sizes.

use ferrospeed_config::Config;
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

use super::exceptions::AppliesTo;

/// Deliberate differences: the heading in `docs/differences.md`, and when it applies.
pub(crate) const DIFFERENCES: &[(&str, AppliesTo)] = &[
    ("Elasticity counts model replicas under model parallelism", |case| {
        case["elasticity"]["model_parallel_size"].as_u64().unwrap_or(1) > 1
    }),
    ("There is no target version", |case| old(case["target_version"].as_str().unwrap_or("1.0.0"))),
    ("The elastic micro-batch is always the largest that fits", |case| {
        case["elasticity"]["prefer_larger_batch"] == false && !case["env_WORLD_SIZE"].is_null()
    }),
];

/// Whether a version is older than 0.3.8, which DeepSpeed refuses.
fn old(version: &str) -> bool {
    let numbers: Vec<u64> = version.split('.').filter_map(|part| part.parse().ok()).collect();
    numbers < vec![0, 3, 8]
}

#[test]
fn golden_elastic_batches() {
    golden().each_case("config/elasticity.json", 52, |case| {
        let found = ours(case);
        let agrees = match (&found, case.get("expect")) {
            (Ok(found), Some(expect)) => {
                let micro_agrees =
                    expect.get("micro_batch_size").is_none_or(|micro| *micro == found["micro_batch_size"]);
                let valid =
                    if expect["valid_gpus"].is_null() { json!([]) } else { expect["valid_gpus"].clone() };
                found["final_batch_size"] == expect["final_batch_size"]
                    && found["valid_gpus"] == valid
                    && micro_agrees
            }
            (Err(_), None) => true,
            _ => false,
        };
        let excused = DIFFERENCES.iter().any(|(_, applies)| applies(case));
        assert!(agrees || excused, "{case}: ours is {found:?}");
    });
}

fn ours(case: &Value) -> Result<Value, String> {
    let config = match &case["elasticity"] {
        Value::Null => json!({}),
        section => json!({ "elasticity": section }),
    };
    let world_size = match case["world_size"].as_u64() {
        Some(0) | None => case["env_WORLD_SIZE"].as_str().and_then(|size| size.parse().ok()),
        given => given,
    };
    let unresolved = Config::from_value("case", &config).map_err(|error| error.to_string())?;
    let batch = unresolved.elastic_batch(world_size).map_err(|error| error.to_string())?;
    let batch = batch.map_err(|error| error.to_string())?;
    if case["return_microbatch"] == true && batch.micro_batch_size.is_none() {
        return Err("the micro-batch depends on the number of ranks".to_owned());
    }
    Ok(json!({
        "final_batch_size": batch.train_batch_size,
        "valid_gpus": batch.valid_replicas,
        "micro_batch_size": batch.micro_batch_size,
    }))
}
