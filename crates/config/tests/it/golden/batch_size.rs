//! The batch triangle.

use ferrospeed_config::Config;
use ferrospeed_testkit::golden::golden;
use serde_json::json;

use super::{Outcome, exceptions, same};

#[test]
fn golden_batch_sizes() {
    golden().each_case("config/batch_size.json", 44, |case| {
        let ours = Outcome::of(Config::from_value("case", &case["config"]), &case["world_size"]);
        match (&ours, case.get("expect")) {
            (Outcome::Accepted(config), Some(expect)) => {
                let found = json!(config.batch);
                assert!(same(&found, expect), "{}: {found} instead of {expect}", case["id"]);
            }
            (Outcome::Refused(_), None) => {}
            _ => assert!(exceptions::excuse(case, &ours), "{case}: {}", ours.describe()),
        }
    });
}
