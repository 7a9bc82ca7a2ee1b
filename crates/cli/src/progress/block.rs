//! The block: what it knows, and the lines it makes of that. No terminal here, so it can be tested as text.

use std::collections::VecDeque;

use ferrospeed_command::terminal::{Colour, Paint, visible};
use ferrospeed_observe::{EvalRecord, RoutingSummary, StepRecord};
use ferrospeed_train::RunInfo;

use super::screen::Row;

/// Speeds are means over this many steps.
const RECENT_STEPS: usize = 20;
/// Losses kept for the sparkline; when there are more, neighbours are merged.
const MOST_LOSSES: usize = 1024;
/// Notes shown.
const NOTES: usize = 2;

const SPARKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Categories of memory in the order they are shown: a letter where there are no colours.
const CATEGORIES: [(&str, Colour, char); 5] = [
    ("parameters", Colour::Blue, 'p'),
    ("gradients", Colour::Yellow, 'g'),
    ("optimizer", Colour::Magenta, 'o'),
    ("activations", Colour::Green, 'a'),
    ("buffers", Colour::Cyan, 'b'),
];

/// What is known of the run.
pub(super) struct Block {
    name: String,
    steps: u64,
    peak_flops_per_s: f64,
    recent: VecDeque<StepRecord>,
    losses: Vec<f32>,
    /// How many steps each of `losses` stands for, and how many the last one has so far.
    merged: u32,
    last_count: u32,
    validation: Option<f32>,
    skipped: u64,
    notes: VecDeque<(Option<Colour>, String)>,
}

impl Block {
    pub(super) fn new(name: &str, steps: u64) -> Block {
        Block {
            name: name.to_owned(),
            steps,
            peak_flops_per_s: f64::NAN,
            recent: VecDeque::new(),
            losses: Vec::new(),
            merged: 1,
            last_count: 0,
            validation: None,
            skipped: 0,
            notes: VecDeque::new(),
        }
    }

    pub(super) fn started(&mut self, info: &RunInfo) {
        (self.peak_flops_per_s, self.steps) = (info.peak_flops_per_s, info.steps);
    }

    /// Says whether it was the last one.
    pub(super) fn step(&mut self, record: &StepRecord) -> bool {
        match (record.measured_loss(), self.losses.last_mut()) {
            (Some(loss), Some(last)) if (1..self.merged).contains(&self.last_count) => {
                self.last_count += 1;
                *last += (loss - *last) / self.last_count as f32;
            }
            (Some(loss), _) => {
                self.losses.push(loss);
                self.last_count = 1;
            }
            (None, _) => {}
        }
        if self.losses.len() > MOST_LOSSES {
            self.losses = self.losses.chunks(2).map(mean).collect();
            self.merged *= 2;
            self.last_count = self.merged;
        }
        self.skipped += u64::from(record.skipped);
        self.recent.push_back(record.clone());
        if self.recent.len() > RECENT_STEPS {
            self.recent.pop_front();
        }
        record.step == self.steps
    }

    pub(super) fn eval(&mut self, record: &EvalRecord) {
        self.validation = Some(record.loss);
    }

    pub(super) fn note(&mut self, text: String) {
        self.push_note(None, text);
    }

    pub(super) fn warn(&mut self, text: &str) {
        self.push_note(Some(Colour::Yellow), format!("warning: {}", text.replace('\n', " ")));
    }

    fn push_note(&mut self, colour: Option<Colour>, text: String) {
        self.notes.push_back((colour, visible(&text, Paint::for_terminal()).into_owned()));
        if self.notes.len() > NOTES {
            self.notes.pop_front();
        }
    }

    /// The lines, none wider than `width`.
    pub(super) fn render(&self, width: usize, paint: Paint) -> Vec<Row> {
        let mut lines = vec![self.progress(width)];
        match self.recent.back() {
            None => lines.push(Line::default().add("waiting for the first step")),
            Some(last) => {
                lines.extend([self.loss(last, width), self.speed(width), self.memory(last, width, paint)]);
                let routing = RoutingSummary::of(&last.routing);
                lines
                    .extend(routing.map(|routing| Line::default().add("experts  ").add(&routing.describe())));
            }
        }
        for (colour, text) in &self.notes {
            lines.push(match colour {
                Some(colour) => Line::default().paint(*colour, text),
                None => Line::default().paint(Colour::Faint, text),
            });
        }
        lines.into_iter().map(|line| line.fit(width, paint)).collect()
    }

    fn mean(&self, value: fn(&StepRecord) -> f64) -> f64 {
        self.recent.iter().map(value).sum::<f64>() / self.recent.len().max(1) as f64
    }

    fn progress(&self, width: usize) -> Line {
        let step = self.recent.back().map_or(0, |last| last.step);
        let share = step as f64 / self.steps.max(1) as f64;
        let seconds = self.steps.saturating_sub(step) as f64 * self.mean(|record| record.step_ms) / 1e3;
        let left = match self.recent.is_empty() {
            true => String::new(),
            false if step == self.steps => "  done".into(),
            false => format!("  {} left", duration(seconds)),
        };
        let head = format!("  step {step}/{}  ", self.steps);
        let tail = format!("  {:>3.0} %{left}", share * 100.0);
        let taken = self.name.chars().count() + head.chars().count() + tail.chars().count();
        let room = width.saturating_sub(taken).clamp(4, 40);
        let filled = (share * room as f64).round() as usize;
        Line::default()
            .paint(Colour::Bold, &self.name)
            .add(&head)
            .paint(Colour::Green, &"━".repeat(filled))
            .paint(Colour::Faint, &"╌".repeat(room - filled.min(room)))
            .add(&tail)
    }

    fn loss(&self, last: &StepRecord, width: usize) -> Line {
        let shown = last.measured_loss().map_or("none".to_owned(), |loss| format!("{loss:.4}"));
        let mut line = Line::default().add("loss ").paint(Colour::Bold, &shown);
        if let Some(validation) = self.validation {
            line = line.add(&format!("  validation {validation:.4}"));
        }
        let norm = last.grad_norm.map_or("skipped".into(), |norm| format!("norm {norm:.3}"));
        let mut rest = format!("  lr {:.2e}  {norm}", last.lr);
        if self.skipped > 0 {
            rest += &format!("  {} skipped", self.skipped);
        }
        let room = width.saturating_sub(line.width() + rest.chars().count() + 2).min(40);
        line.add("  ").paint(Colour::Cyan, &sparkline(&self.losses, room)).add(&rest)
    }

    fn speed(&self, width: usize) -> Line {
        let flops = self.mean(|record| record.flops_per_s);
        let mut line = Line::default().add(&format!(
            "{} tokens/s  {}FLOP/s",
            counted(self.mean(|record| record.tokens_per_s), ""),
            counted(flops, " "),
        ));
        let share = 100.0 * flops / self.peak_flops_per_s;
        if share.is_finite() {
            let peak = format!(" of the measured {}FLOP/s", counted(self.peak_flops_per_s, " "));
            line = line.add(", ").paint(Colour::Bold, &format!("{share:.0} %")).add(&peak);
        }
        let phases = format!(
            ": forward {:.0}, backward {:.0}, optimizer {:.0}",
            self.mean(|record| record.forward_ms),
            self.mean(|record| record.backward_ms),
            self.mean(|record| record.optimizer_ms),
        );
        let line = line.add(&format!("  {:.0} ms", self.mean(|record| record.step_ms)));
        if line.width() + phases.chars().count() <= width { line.paint(Colour::Faint, &phases) } else { line }
    }

    fn memory(&self, last: &StepRecord, width: usize, paint: Paint) -> Line {
        let bytes = |name: &str| last.memory_bytes.get(name).copied().unwrap_or(0);
        let total: u64 = CATEGORIES.iter().map(|(name, _, _)| bytes(name)).sum();
        let mut line = Line::default().add(&format!("memory {}  ", binary(bytes("total"))));
        let room = (width / 4).clamp(10, 30);
        let mut drawn = 0;
        let mut sum = 0;
        for (name, colour, letter) in CATEGORIES {
            sum += bytes(name);
            let end = (sum as f64 / total.max(1) as f64 * room as f64).round() as usize;
            let glyph = if paint.is_on() { '█' } else { letter };
            line = line.paint(colour, &glyph.to_string().repeat(end - drawn));
            drawn = end;
        }
        for (name, colour, _) in CATEGORIES.iter().filter(|(name, _, _)| bytes(name) > 0) {
            let amount = format!(" {}", binary(bytes(name)));
            if line.width() + 2 + name.len() + amount.len() > width {
                break;
            }
            line = line.add("  ").paint(*colour, name).add(&amount);
        }
        line
    }
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

/// The losses as `room` bars between their lowest and highest; one that is no number is a gap.
fn sparkline(losses: &[f32], room: usize) -> String {
    let bars = losses.len().min(room);
    let values: Vec<f32> = (0..bars)
        .map(|bar| mean(&losses[bar * losses.len() / bars..(bar + 1) * losses.len() / bars]))
        .collect();
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = (finite().fold(f32::INFINITY, f32::min), finite().fold(f32::NEG_INFINITY, f32::max));
    let bar = |value: &f32| match value {
        value if !value.is_finite() => '×',
        value if high > low => SPARKS[((value - low) / (high - low) * 7.0).round() as usize],
        _ => SPARKS[0],
    };
    values.iter().map(bar).collect()
}

/// `950`, `12.3k`, `4.56M`, with something between number and suffix.
fn counted(value: f64, between: &str) -> String {
    if !value.is_finite() {
        return format!("?{between}");
    }
    let (mut value, mut index) = (value, 0);
    let suffixes = ["", "k", "M", "G", "T", "P"];
    while value.abs() >= 999.5 && index + 1 < suffixes.len() {
        value /= 1000.0;
        index += 1;
    }
    let digits = if index == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$}{between}{}", suffixes[index])
}

fn binary(bytes: u64) -> String {
    match bytes as f64 / 1024.0 {
        kibibytes if kibibytes < 1023.5 => format!("{kibibytes:.0} KiB"),
        kibibytes if kibibytes < 1024.0 * 1023.5 => format!("{:.0} MiB", kibibytes / 1024.0),
        kibibytes => format!("{:.1} GiB", kibibytes / f64::from(1 << 20)),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() => "?".into(),
        s if s < 99.5 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s if s < 360_000.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

/// A line in pieces, which know their width before they are coloured.
#[derive(Default)]
struct Line(Vec<(Option<Colour>, String)>);

impl Line {
    fn add(mut self, text: &str) -> Line {
        self.0.push((None, text.to_owned()));
        self
    }

    fn paint(mut self, colour: Colour, text: &str) -> Line {
        self.0.push((Some(colour), text.to_owned()));
        self
    }

    fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.chars().count()).sum()
    }

    /// What fits, in colours where they show.
    fn fit(self, width: usize, paint: Paint) -> Row {
        let mut row = Row { width: 0, text: String::new() };
        for (colour, text) in self.0 {
            // Names and notes come from outside: a control character would move the cursor.
            let text: String =
                text.chars().map(|c| if c.is_control() { '?' } else { c }).take(width - row.width).collect();
            row.width += text.chars().count();
            match colour {
                Some(colour) => row.text.push_str(&paint.paint(colour, &text)),
                None => row.text.push_str(&text),
            }
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: f32) -> StepRecord {
        StepRecord {
            step,
            loss,
            no_targets: false,
            lr: 1.5e-3,
            grad_norm: Some(0.5),
            tokens: step * 100,
            tokens_per_s: 12_345.0,
            step_ms: 250.0,
            forward_ms: 80.0,
            backward_ms: 130.0,
            optimizer_ms: 30.0,
            flops_per_s: 2.1e11,
            memory_bytes: [("parameters", 10 << 20), ("activations", 30 << 20), ("total", 35 << 20)]
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

    fn text(block: &Block, width: usize) -> String {
        let rows = block.render(width, Paint::default());
        rows.iter().map(|row| row.text.clone() + "\n").collect()
    }

    fn block() -> Block {
        let mut block = Block::new("mine", 100);
        block.peak_flops_per_s = 6e11;
        block
    }

    #[test]
    fn a_block_says_all_there_is_to_say() {
        let mut block = block();
        for step in 1..=40 {
            block.step(&record(step, 5.0 - step as f32 * 0.1));
        }
        block.eval(&EvalRecord { step: 40, loss: 1.25, tokens: 1, ..EvalRecord::default() });
        block.warn("the disk\nis full");
        let expected = "\
mine  step 40/100  ━━━━━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌   40 %  15 s left
loss 1.0000  validation 1.2500  ███▇▇▇▇▇▇▆▆▆▆▆▅▅▅▅▅▅▄▄▄▄▄▄▃▃▃▃▃▂▂▂▂▂▂▁▁▁  lr 1.50e-3  norm 0.500
12.3k tokens/s  210 GFLOP/s, 35 % of the measured 600 GFLOP/s  250 ms
memory 35 MiB  ppppppaaaaaaaaaaaaaaaaaa  parameters 10 MiB  activations 30 MiB
warning: the disk is full
";
        let found = text(&block, 99);
        assert_eq!(found, expected, "{found}");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_and_no_name_moves_the_cursor() {
        let mut block = Block::new("a\u{1b}[2Jname", 3);
        for width in [20, 33, 80, 200] {
            block.step(&record(1, f32::NAN));
            block.note("\u{1b}[5A".repeat(80));
            for row in block.render(width, Paint::default()) {
                assert!(row.width <= width && row.text.chars().count() == row.width, "{}", row.text);
                assert!(!row.text.contains('\u{1b}'));
            }
        }
        assert!(text(&Block::new("x", 3), 40).contains("waiting for the first step"));
    }

    #[test]
    fn a_long_run_keeps_a_bounded_curve() {
        let mut block = block();
        for step in 1..=10_000 {
            block.step(&record(step, step as f32));
        }
        assert!(block.losses.len() <= MOST_LOSSES);
        assert!(block.losses.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(sparkline(&block.losses, 8), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[1.0, f32::NAN, 1.0], 8), "▁×▁");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!((counted(950.0, ""), counted(12_345.0, " ")), ("950".into(), "12.3 k".into()));
        assert_eq!(
            (duration(42.0), duration(600.0), duration(7200.0)),
            ("42 s".into(), "10 min".into(), "2.0 h".into())
        );
    }
}
