//! The printed form of a configuration.

use ferrospeed_testkit::golden::golden;

#[test]
fn golden_printed_configurations() {
    golden().each_case("utils/monitor.json", 4, |case| {
        // The other cases of this file are about monitors.
        if case["fn"] == "config_json" {
            let found = ferrospeed_config::print::as_deepspeed(&case["value"]);
            assert_eq!(Some(found.as_str()), case["expect"].as_str(), "{}", case["id"]);
        }
    });
}
