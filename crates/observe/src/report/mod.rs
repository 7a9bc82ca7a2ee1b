//! The report of a run: one HTML page that needs nothing else.
//!
//! Charts are inline SVG drawn here; there is no script, no font, no image, and a policy in the page forbids loading
//! any. It follows the reader's choice of light or dark. All text from outside is escaped. Long runs are drawn with
//! the lowest and highest value of every stretch, so that a spike stays visible; values that are no numbers break
//! the curve and are marked; skipped steps are marked.
//!
//! ```
//! use ferrospeed_observe::report::{Report, render};
//!
//! let page = render(&Report { title: "my run", steps: &[], evals: &[], facts: &[], documents: &[], roofline: None });
//! assert!(page.starts_with("<!DOCTYPE html>"));
//! ```

mod chart;
mod frame;
pub(crate) mod layers;
mod roof;
pub(crate) mod series;
pub(crate) mod spikes;
pub(crate) mod summary;
mod text;
mod tuning;

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::record::{EvalRecord, StepRecord};
use crate::roofline::Roofline;
use chart::{Heading, Line};
use layers::Layers;
use series::{Merge, Point};
use text::{Escaped, Unit};
pub use tuning::{TriedPoint, Tuning, render_tuning};

/// Longer texts are folded.
const LONGEST_OPEN_LINES: usize = 80;

/// What a report is made from.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// The name of the run.
    pub title: &'a str,
    /// Its steps. Of several records of one step (after a resume) the last counts.
    pub steps: &'a [StepRecord],
    /// Its validations; likewise.
    pub evals: &'a [EvalRecord],
    /// Further facts by name: model, ranks, device, …
    pub facts: &'a [(String, String)],
    /// Texts by name, shown as they are: the configuration, the recipe, a sample of generated text.
    pub documents: &'a [(String, String)],
    /// What its modules were held back by, where they were profiled.
    pub roofline: Option<&'a Roofline>,
}

/// The page.
pub fn render(report: &Report<'_>) -> String {
    let steps: BTreeMap<u64, &StepRecord> = report.steps.iter().map(|record| (record.step, record)).collect();
    let evals: BTreeMap<u64, &EvalRecord> = report.evals.iter().map(|record| (record.step, record)).collect();
    let steps: Vec<&StepRecord> = steps.into_values().collect();
    let evals: Vec<&EvalRecord> = evals.into_values().collect();

    let mut page = head(report.title);
    if steps.is_empty() && evals.is_empty() {
        page.push_str("<p class=\"none\">No step was recorded.</p>\n");
    } else {
        push_tiles(&mut page, &steps, &evals);
        page.push_str("<section class=\"charts\">\n");
        push_charts(&mut page, &steps, &evals);
        page.push_str(&report.roofline.map_or_else(String::new, roof::figure));
        page.push_str("</section>\n");
    }
    push_facts(&mut page, report.facts);
    for (name, text) in report.documents {
        // A long one, such as a configuration with all its defaults, is there to be opened.
        let open = if text.lines().count() <= LONGEST_OPEN_LINES { " open=\"open\"" } else { "" };
        let (name, text) = (Escaped(name), Escaped(text));
        let _ = writeln!(page, "<details{open}><summary>{name}</summary><pre>{text}</pre></details>");
    }
    page + "</body>\n</html>\n"
}

/// The beginning of a page that may load nothing.
fn head(title: &str) -> String {
    let title = Escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
        include_str!("page.css")
    )
}

fn push_tiles(page: &mut String, steps: &[&StepRecord], evals: &[&EvalRecord]) {
    page.push_str("<dl class=\"tiles\">\n");
    for tile in summary::tiles(steps, evals) {
        let small =
            if tile.remark.is_empty() { String::new() } else { format!("<small>{}</small>", tile.remark) };
        let _ = writeln!(page, "<div><dt>{}</dt><dd>{}{small}</dd></div>", tile.name, tile.value);
    }
    page.push_str("</dl>\n");
}

/// What a curve takes from a step, where the step has it.
type Value = fn(&StepRecord) -> Option<f64>;

fn push_charts(page: &mut String, steps: &[&StepRecord], evals: &[&EvalRecord]) {
    let skipped: Vec<f64> =
        steps.iter().filter(|record| record.skipped).map(|record| record.step as f64).collect();
    let heading = |title, unit| Heading { title, note: "", unit };
    let line = |name, value: Value| Line {
        name,
        points: steps.iter().filter_map(|record| Some((record.step as f64, value(record)?))).collect(),
        dotted: false,
    };
    let validation: Vec<Point> =
        evals.iter().map(|record| (record.step as f64, record.loss.into())).collect();
    let dotted = validation.len() <= 100;
    let validation = Line { name: "validation", points: validation, dotted };
    let losses = [line("training", |record| record.measured_loss().map(f64::from)), validation];
    page.push_str(&chart::lines(&heading("Loss", Unit::Plain), &losses, &skipped, false));
    let others: [(_, _, _, Value); 3] = [
        ("Learning rate", Unit::Plain, "learning rate", |record| Some(record.lr)),
        ("Tokens per second", Unit::Count, "all ranks", |record| Some(record.tokens_per_s)),
        ("Gradient norm before clipping", Unit::Plain, "gradient norm", |record| record.grad_norm),
    ];
    for (title, unit, name, value) in others {
        page.push_str(&chart::lines(&heading(title, unit), &[line(name, value)], &[], true));
    }
    push_measures(page, steps);
    push_memory(page, steps);
    push_times(page, steps);
}

/// What an objective says besides the loss: one chart for what stands before a slash. A share has a scale of its own.
fn push_measures(page: &mut String, steps: &[&StepRecord]) {
    let mut charts: BTreeMap<&str, BTreeMap<&str, Vec<Point>>> = BTreeMap::new();
    for record in steps {
        for (name, value) in &record.measures {
            let (title, line) = match name.split_once('/') {
                Some((title, line)) if line != "accuracies" => (title, line),
                _ => (name.as_str(), name.as_str()),
            };
            charts.entry(title).or_default().entry(line).or_default().push((record.step as f64, *value));
        }
    }
    for (title, lines) in charts {
        let heading = Heading { title, note: "", unit: Unit::Plain };
        let lines: Vec<Line<'_>> =
            lines.into_iter().map(|(name, points)| Line { name, points, dotted: false }).collect();
        page.push_str(&chart::lines(&heading, &lines, &[], false));
    }
}

fn push_memory(page: &mut String, steps: &[&StepRecord]) {
    let Layers { names, rows, totals } = layers::memory(steps);
    let note = "Each category at its own peak within the step; these need not fall together, so the peak of all \
                may lie below their sum.";
    let heading = Heading { title: "Memory of rank 0", note, unit: Unit::Bytes };
    let outline = Line { name: "peak of all", points: totals, dotted: false };
    page.push_str(&chart::layers(&heading, &names, &rows, Merge::Highest, Some(outline)));
}

fn push_times(page: &mut String, steps: &[&StepRecord]) {
    let Layers { names, rows, .. } = layers::times(steps);
    let heading = Heading { title: "Time per step", note: "", unit: Unit::Milliseconds };
    page.push_str(&chart::layers(&heading, &names, &rows, Merge::Mean, None));
}

fn push_facts(page: &mut String, facts: &[(String, String)]) {
    if facts.is_empty() {
        return;
    }
    page.push_str("<h2>The run</h2>\n<table>\n<tbody>\n");
    for (name, value) in facts {
        let _ =
            writeln!(page, "<tr><th scope=\"row\">{}</th><td>{}</td></tr>", Escaped(name), Escaped(value));
    }
    page.push_str("</tbody>\n</table>\n");
}
