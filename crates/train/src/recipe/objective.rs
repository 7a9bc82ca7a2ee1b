//! `objective = "dpo"`, or a table of it: what a run minimises.

use ferrospeed_data::{Layout, SampleKind};
use serde::{Deserialize, Serialize};

use super::Recipe;
use crate::objective::{Dpo, DpoLoss, Kto, Objective, Orpo};

/// What a run minimises, as it is written.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectiveRecipe {
    /// `next_token` (the default), `dpo`, `kto` or `orpo`.
    pub kind: String,
    /// How much the reference holds the model back; of `orpo`, how much odds count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// Of `dpo`: `sigmoid` (the default), `robust`, `hinge` or `ipo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<String>,
    /// Of `dpo`: the share of labels that are taken to be wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing: Option<f64>,
    /// Of `dpo`: whether all answers are alike to the reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_free: Option<bool>,
    /// Of `kto`: how much answers count that are wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desirable_weight: Option<f64>,
    /// Of `kto`: how much the others do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undesirable_weight: Option<f64>,
}

const KINDS: [&str; 4] = ["next_token", "dpo", "kto", "orpo"];

impl ObjectiveRecipe {
    fn objective(&self) -> Objective {
        let beta = self.beta.unwrap_or(0.1);
        match self.kind.as_str() {
            "dpo" => Objective::Dpo(Dpo {
                beta,
                loss: self.loss.as_deref().and_then(DpoLoss::of_name).unwrap_or_default(),
                label_smoothing: self.label_smoothing.unwrap_or(0.0),
                reference_free: self.reference_free.unwrap_or(false),
            }),
            "kto" => Objective::Kto(Kto {
                beta,
                desirable_weight: self.desirable_weight.unwrap_or(1.0),
                undesirable_weight: self.undesirable_weight.unwrap_or(1.0),
            }),
            "orpo" => Objective::Orpo(Orpo { beta }),
            // What else is written is refused.
            _ => Objective::NextToken,
        }
    }

    /// What is wrong with its own keys.
    fn own_problems(&self, refuse: &mut impl FnMut(bool, String)) {
        let kind = self.kind.as_str();
        if !KINDS.contains(&kind) {
            return refuse(true, format!("objective: '{kind}' is not known; use {}", list(&KINDS)));
        }
        for (key, is_given, owners) in [
            ("beta", self.beta.is_some(), &["dpo", "kto", "orpo"][..]),
            ("loss", self.loss.is_some(), &["dpo"]),
            ("label_smoothing", self.label_smoothing.is_some(), &["dpo"]),
            ("reference_free", self.reference_free.is_some(), &["dpo"]),
            ("desirable_weight", self.desirable_weight.is_some(), &["kto"]),
            ("undesirable_weight", self.undesirable_weight.is_some(), &["kto"]),
        ] {
            let is_foreign = is_given && !owners.contains(&kind);
            refuse(is_foreign, format!("objective.{key}: belongs to {}, not to {kind}", list(owners)));
        }
        let loss = self.loss.as_deref().unwrap_or("sigmoid");
        let names = DpoLoss::ALL.map(DpoLoss::name);
        refuse(
            !names.contains(&loss),
            format!("objective.loss: '{loss}' is not known; use {}", list(&names)),
        );
        for (key, value) in [
            ("beta", self.beta),
            ("desirable_weight", self.desirable_weight),
            ("undesirable_weight", self.undesirable_weight),
        ] {
            let is_sensible = value.is_none_or(|value| value > 0.0 && value <= 1e6);
            refuse(!is_sensible, format!("objective.{key}: must be more than 0 and at most 1000000"));
        }
        let smoothing = self.label_smoothing.unwrap_or(0.0);
        refuse(
            !(0.0..0.5).contains(&smoothing),
            "objective.label_smoothing: must be a share of wrong labels, 0 or more and less than 0.5".into(),
        );
        refuse(
            smoothing > 0.0 && ["hinge", "ipo"].contains(&loss),
            format!(
                "objective.label_smoothing: the loss '{loss}' takes all labels for right; use sigmoid or robust, or leave it out"
            ),
        );
    }
}

fn list(names: &[&str]) -> String {
    match names {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        names => names.concat(),
    }
}

impl Recipe {
    /// What the run minimises.
    pub fn objective(&self) -> Objective {
        self.objective.as_ref().map_or(Objective::NextToken, ObjectiveRecipe::objective)
    }

    /// Tokens of a row: `data.sequence`, or twice that where a row holds two samples.
    pub fn row_tokens(&self) -> u64 {
        match self.objective().layout() {
            Layout::Packed => self.data.sequence,
            Layout::Pairs | Layout::Judged => self.data.sequence.saturating_mul(2),
        }
    }

    /// What is wrong with its objective, and with what is asked for beside it.
    pub(super) fn objective_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut refuse = |wrong: bool, problem: String| {
            if wrong {
                problems.push(problem);
            }
        };
        if let Some(objective) = &self.objective {
            objective.own_problems(&mut refuse);
        }
        let (objective, data) = (self.objective(), &self.data);
        let (name, layout) = (objective.name(), objective.layout());
        let said = data.kind.as_deref().and_then(SampleKind::of_name);
        if let Some(kind) = said.filter(|kind| kind.layout() != layout) {
            let (wanted, write) = match kind.layout() {
                Layout::Pairs => ("pairs of answers", "write objective = \"dpo\" (or \"orpo\")"),
                Layout::Judged => ("answers that are wanted or not", "write objective = \"kto\""),
                Layout::Packed => ("samples to imitate", "take objective away"),
            };
            let why = format!(
                "data.kind: '{kind}' is of {wanted}, and the objective is {name}; {write}, or give other data"
            );
            refuse(true, why);
        }
        if layout == Layout::Packed {
            return problems;
        }
        let records = match layout {
            Layout::Judged => "'prompt', 'completion' and 'label'",
            _ => "'chosen' and 'rejected'",
        };
        refuse(
            data.samples.is_none(),
            format!(
                "objective: {name} learns from records with {records}; name files of them with data.samples"
            ),
        );
        for (key, is_given, why) in [
            ("data.train_on", data.train_on.is_some(), "learns answers alone"),
            (
                "data.too_long",
                data.too_long.as_deref() == Some("split"),
                "needs answers whole: use cut or drop",
            ),
            (
                "data.documents",
                data.documents.as_deref() == Some("together"),
                "compares what has not seen each other",
            ),
        ] {
            refuse(is_given, format!("{key}: {name} {why}; leave it out"));
        }
        let mesh = self.mesh();
        for (key, ranks) in [
            ("pipeline.stages (--pp)", mesh.pipe),
            ("tensor_parallel.autotp_size (--tp)", mesh.tensor),
            ("sequence_parallel_size (--sp)", mesh.sequence),
        ] {
            refuse(
                ranks.get() > 1,
                format!(
                    "{key}: {name} needs whole models and sequences on each rank; use more ranks that see different data, and ZeRO stage 3 for memory"
                ),
            );
        }
        if let Ok((config, _)) = self.config() {
            let [by_length] = self.given(["curriculum_learning.enabled"]);
            let is_paced = config.data_sampling.is_some() || by_length == Some(true.into());
            refuse(is_paced, format!("curriculum learning: {name} has no order of difficulty; leave it out"));
        }
        problems
    }
}
