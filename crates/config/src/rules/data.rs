//! Rules of `data_efficiency.data_sampling`: what a curriculum by metrics needs.

use serde_json::{Map, Value};

use super::Rules;
use crate::auto::lookup;
use crate::typed::CUTS_SEQUENCES;

const SAMPLING: &str = "data_efficiency.data_sampling";
const METRICS: &str = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics";

impl Rules<'_> {
    pub(super) fn data(&mut self) {
        if !self.flag(&format!("{SAMPLING}.curriculum_learning.enabled")) {
            if self.flag(&format!("{SAMPLING}.enabled")) {
                let why = "has an effect with `curriculum_learning.enabled` only: without a curriculum every sequence is drawn once per epoch";
                self.no_effect(
                    &format!("{SAMPLING}.enabled"),
                    why,
                    "remove it, or enable `curriculum_learning`",
                );
            }
            return;
        }
        let metrics =
            lookup(self.full, METRICS).and_then(Value::as_object).filter(|metrics| !metrics.is_empty());
        let Some(metrics) = metrics.cloned() else {
            let why = "required when curriculum learning is enabled";
            return self.missing(METRICS, why, "add one entry per metric");
        };
        for (name, metric) in metrics {
            let path = format!("{METRICS}.{name}");
            match metric.as_object() {
                Some(metric) => self.metric(&path, &name, metric),
                None => {
                    self.missing(&path, "says nothing", "say where its index is, and how difficulty grows")
                }
            }
        }
    }

    fn metric(&mut self, path: &str, name: &str, metric: &Map<String, Value>) {
        let text = |key: &str| metric.get(key).and_then(Value::as_str);
        let cuts = name == CUTS_SEQUENCES;
        let is_one_cluster = text("clustering_type") == Some("single_cluster");
        let mut wanted =
            vec!["clustering_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config"];
        if !is_one_cluster {
            wanted.extend(["difficulty_type", "index_to_sample_path"]);
            wanted.extend((text("difficulty_type") == Some("value")).then_some("index_to_metric_path"));
        }
        for key in wanted {
            if metric.get(key).is_none_or(|value| value.is_null() || value == "") {
                let help = match key {
                    "index_to_sample_path" | "index_to_metric_path" => {
                        "`ferrospeed data analyze` writes the file".to_owned()
                    }
                    _ => format!("add \"{key}\""),
                };
                self.missing(&format!("{path}.{key}"), "required by curriculum learning", help);
            }
        }
        let clustering = format!("{path}.clustering_type");
        if is_one_cluster && !cuts {
            let why = format!(
                "a metric of one cluster chooses no sequences, and only `{CUTS_SEQUENCES}` is acted on in another way"
            );
            self.unsupported(&clustering, why, "write \"schedule_based\"");
        }
        if cuts && text("clustering_type") == Some("schedule_based") {
            let why = "cuts sequences, and chooses none";
            self.unsupported(&clustering, why, "write \"single_cluster\", or give the metric another name");
        }
        if cuts && self.flag("curriculum_learning.enabled") {
            let why = "`curriculum_learning` cuts sequences too";
            self.conflict(path, why, "keep one of the two");
        }
        if text("schedule_type") == Some("custom") {
            let why = "a schedule of one's own is a function, which a file cannot hold";
            let help = "write \"fixed_discrete\" with the difficulties in turn";
            self.unsupported(&format!("{path}.schedule_type"), why, help);
        }
        let parts = metric.get("max_difficulty").and_then(Value::as_u64);
        if text("difficulty_type") == Some("percentile") && parts == Some(0) && !is_one_cluster {
            let why = "percentiles are parts of the sequences, of which there must be some";
            self.unsupported(&format!("{path}.max_difficulty"), why, "write 100");
        }
    }
}
