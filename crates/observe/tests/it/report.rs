//! The report as a reader's browser gets it.

use ferrospeed_observe::report::{Report, render};
use ferrospeed_observe::roofline::{Limit, Peak, Place, Roofline};
use ferrospeed_observe::{EvalRecord, StepRecord};

fn step(step: u64) -> StepRecord {
    StepRecord {
        step,
        loss: 5.0 / (step as f32).sqrt() + 1.0,
        no_targets: false,
        lr: 3e-4,
        grad_norm: Some(0.7),
        tokens: step * 1024,
        tokens_per_s: 40_000.0,
        step_ms: 120.0,
        forward_ms: 40.0,
        backward_ms: 60.0,
        optimizer_ms: 15.0,
        flops_per_s: 5e10,
        memory_bytes: [("parameters", 1 << 20), ("activations", 3 << 20), ("total", 7 << 19)]
            .map(|(name, bytes)| (name.to_owned(), bytes))
            .into(),
        skipped: false,
        loss_scale: 1.0,
        routing: Vec::new(),
        ranks: Vec::new(),
        rank_memory_bytes: Vec::new(),
        layer_norms: Vec::new(),
        measures: Default::default(),
    }
}

fn page_of(steps: &[StepRecord], evals: &[EvalRecord]) -> String {
    let page = render(&Report { title: "run", steps, evals, facts: &[], documents: &[], roofline: None });
    check_well_formed(&page);
    page
}

/// Every tag is closed by its own name and in order, attributes are quoted, and no coordinate is NaN or infinite.
fn check_well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page.strip_prefix("<!DOCTYPE html>\n").expect("a document type");
    while let Some(start) = rest.find('<') {
        assert!(!rest[..start].contains('>'), "a bare > in {:?}", &rest[..start]);
        let end = start + rest[start..].find('>').expect("a tag that ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        assert_eq!(tag.matches('"').count() % 2, 0, "quotes of <{tag}>");
        assert!(!tag.contains("NaN") && !tag.contains("inf"), "<{tag}>");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "</{name}>");
        } else if !tag.ends_with('/') {
            let name = tag.split_whitespace().next().expect("a name");
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
            open.push(name);
            if name == "style" {
                // Style sheets are no markup: `>` is a combinator there.
                rest = &rest[rest.find("</style>").expect("the end of the style")..];
            }
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
    assert_eq!(rest, "\n");
}

fn count(page: &str, what: &str) -> usize {
    page.matches(what).count()
}

#[test]
fn every_series_of_a_run_is_there() {
    let steps: Vec<StepRecord> = (1..=50).map(step).collect();
    let evals = [25, 50].map(|step| EvalRecord { step, loss: 2.0, tokens: 100, ..EvalRecord::default() });
    let page = page_of(&steps, &evals);
    assert_eq!(count(&page, "<svg "), 6);
    for name in
        ["training", "validation", "learning rate", "all ranks", "parameters", "activations", "peak of all"]
    {
        assert!(page.contains(&format!("</i>{name}</span>")), "{name}");
    }
    for name in ["forward", "backward", "optimizer", "other"] {
        assert!(page.contains(&format!("</i>{name}</span>")), "{name}");
    }
    assert!(!page.contains("</i>total</span>"), "the total is no category");
    assert_eq!(count(&page, "class=\"area "), 2 + 4);
    assert_eq!(count(&page, "class=\"dot s1\""), 2);
    assert!(page.contains("<dt>Steps</dt><dd>50</dd>"));
    assert!(page.contains("<dt>Peak memory</dt><dd>3.5 MiB"));
    assert!(page.contains("best 2 at step 25"));
}

#[test]
fn the_page_loads_nothing_and_runs_nothing() {
    let page = page_of(&[step(1)], &[]);
    for word in
        ["<script", "<link", "<img", "href", "src=", "url(", "@import", "http://", "https://", "onload"]
    {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("prefers-color-scheme: dark"));
}

#[test]
fn hostile_names_and_texts_stay_text() {
    let hostile = "</pre><script>alert(1)</script>\" onload='x' & \u{1b}[31m\0";
    let mut record = step(1);
    record.memory_bytes.insert(hostile.into(), 5);
    let named = [(hostile.to_owned(), hostile.to_owned())];
    let page = render(&Report {
        title: hostile,
        steps: &[record],
        evals: &[],
        facts: &named,
        documents: &named,
        roofline: None,
    });
    check_well_formed(&page);
    assert!(!page.contains("<script"));
    assert!(!page.contains('\u{1b}') && !page.contains('\0'));
    assert!(count(&page, "&lt;script&gt;") >= 7);
}

#[test]
fn an_empty_run_says_so() {
    let page = page_of(&[], &[]);
    assert!(page.contains("No step was recorded."));
    assert_eq!(count(&page, "<svg"), 0);
}

#[test]
fn one_step_is_drawn_as_a_dot() {
    let page = page_of(&[step(1)], &[]);
    assert!(count(&page, "<circle ") >= 3);
    assert_eq!(count(&page, "class=\"area "), 6);
}

#[test]
fn steps_of_any_number_are_drawn() {
    for steps in [&[u64::MAX][..], &[0], &[u64::MAX - 1, u64::MAX], &[0, u64::MAX]] {
        let records: Vec<StepRecord> =
            steps.iter().map(|&number| StepRecord { step: number, ..step(1) }).collect();
        assert_eq!(count(&page_of(&records, &[]), "<svg "), 6);
    }
}

#[test]
fn a_run_with_only_validations_is_drawn() {
    let page = page_of(&[], &[EvalRecord { loss: 4.0, tokens: 1, ..EvalRecord::default() }]);
    assert!(page.contains("<dt>Validation loss</dt><dd>4<"));
    assert_eq!(count(&page, "<svg "), 1);
}

#[test]
fn a_long_run_stays_a_small_page() {
    let steps: Vec<StepRecord> = (1..=100_000).map(step).collect();
    let page = page_of(&steps, &[]);
    assert!(page.len() < 300_000, "{} bytes", page.len());
    assert!(page.contains("<dt>Steps</dt><dd>100000</dd>"));
    assert_eq!(count(&page, "text-anchor=\"end\">100k</text>"), 6, "every chart reaches the last step");
}

#[test]
fn steps_that_are_no_numbers_or_were_skipped_are_marked() {
    let mut steps: Vec<StepRecord> = (1..=9).map(step).collect();
    steps[3].loss = f32::NAN;
    steps[4].loss = f32::INFINITY;
    steps[4].skipped = true;
    steps[4].grad_norm = None;
    steps[5].lr = f64::NAN;
    steps[6].tokens_per_s = f64::NEG_INFINITY;
    steps[7].step_ms = f64::NAN;
    steps[8].lr = f64::MAX;
    let page = page_of(&steps, &[EvalRecord { step: 9, loss: f32::NAN, tokens: 1, ..EvalRecord::default() }]);
    assert!(page.contains("<title>step 4: not a number</title>"));
    assert!(page.contains("<title>step 5: skipped</title>"));
    assert!(page.contains("Crosses at the upper edge") && page.contains("Marks at the lower edge"));
    assert!(page.contains("<dd>9<small>1 skipped</small></dd>"));
    assert!(page.contains("<dt>Validation loss</dt><dd>not a number</dd>"));
    steps.iter_mut().for_each(|record| record.loss = f32::NAN);
    assert!(page_of(&steps, &[]).contains("No number was recorded."));
}

#[test]
fn a_step_repeated_after_a_resume_counts_once() {
    let mut again = step(2);
    again.loss = 9.5;
    let page = page_of(&[step(1), step(2), again], &[]);
    assert!(page.contains("<dt>Training loss</dt><dd>9.5<"));
}

#[test]
fn more_memory_categories_than_colours_share_the_last() {
    let mut record = step(1);
    record.memory_bytes = (0..40).map(|index| (format!("category {index:02}"), u64::MAX)).collect();
    let page = page_of(&[record], &[]);
    assert!(page.contains("</i>other categories</span>"));
    assert_eq!(count(&page, "class=\"area "), 8 + 4);
}

#[test]
fn a_profiled_run_shows_its_modules_under_the_roof() {
    let place = |module: &str, flops, bytes, seconds| Place { module: module.into(), flops, bytes, seconds };
    let places = vec![
        place("h.0.<mlp>", 8_000_000, 10_000, 1e-5),
        place("h.1.<mlp>", 8_000_000, 10_000, 1e-5),
        place("norm", 1000, 8000, 1e-6),
        place("lookup", 0, 8000, 1e-6),
        place("idle", 0, 0, 0.0),
    ];
    let peak = Peak { flops_per_s: 1e12, bytes_per_s: 1e10 };
    let roofline = Roofline::of_modules(peak, places);
    let names: Vec<&str> = roofline.places.iter().map(|place| place.module.as_str()).collect();
    assert_eq!(names, ["h.*.<mlp>", "norm", "lookup"]);
    let [of_flops, of_bytes] = roofline.places[0].shares(&peak);
    assert!((of_flops - 0.8).abs() < 1e-9 && (of_bytes - 0.1).abs() < 1e-9, "{of_flops} {of_bytes}");
    let limits = roofline.places.iter().map(|place| peak.limit(place));
    assert_eq!(limits.collect::<Vec<_>>(), [Limit::Compute, Limit::Memory, Limit::Memory]);
    let page = render(&Report {
        title: "run",
        steps: &[step(1)],
        evals: &[],
        facts: &[],
        documents: &[],
        roofline: Some(&roofline),
    });
    check_well_formed(&page);
    // What does no operations has no place over operations per byte.
    assert_eq!(page.matches("% of the ").count(), 2, "{page}");
    assert!(page.contains("h.*.&lt;mlp&gt;: 80 % of the cores' peak"), "{page}");
    let nothing = Roofline { peak, places: Vec::new() };
    let page = render(&Report {
        title: "run",
        steps: &[step(1)],
        evals: &[],
        facts: &[],
        documents: &[],
        roofline: Some(&nothing),
    });
    assert!(!page.contains("What holds modules back"));
}

#[test]
fn what_an_objective_says_has_charts_of_its_own() {
    let measures = |at: u64| {
        let all =
            [("rewards/chosen", 0.5), ("rewards/margins", 0.25), ("rewards/accuracies", 1.0), ("kl", 0.125)];
        all.map(|(name, value)| (name.to_owned(), value * at as f64)).into()
    };
    let steps: Vec<StepRecord> =
        (1..=3).map(|number| StepRecord { step: number, measures: measures(number), ..step(1) }).collect();
    let page = page_of(&steps, &[]);
    for title in ["rewards", "rewards/accuracies", "kl"] {
        assert!(page.contains(&format!(">{title}<")), "{title}");
    }
    assert!(page.contains("margins") && !page_of(&[step(1)], &[]).contains("rewards"));
}
