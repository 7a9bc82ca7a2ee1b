//! Schedules as pictures: time from left to right, one row per stage.

use std::fmt::Write;

use crate::schedule::Instruction;
use crate::simulate::Simulation;

/// Pixels of one unit of time and of one row in an SVG.
const UNIT_PX: f64 = 24.0;
const ROW_PX: f64 = 28.0;

/// One character per `unit` of time: the micro-batch's last digit in forward, its letter in backward (`a` is 0), `w` for
/// gradients of weights, `.` where the stage idles.
pub fn text(simulation: &Simulation, unit: f64, width: usize) -> String {
    let end = simulation.makespan();
    let columns = ((end / unit).ceil() as usize).min(width);
    let mut drawn = String::new();
    for (stage, spans) in simulation.spans.iter().enumerate() {
        let mut row = vec!['.'; columns];
        for span in spans {
            let from = (span.start / unit).round() as usize;
            let to = (span.end / unit).round() as usize;
            row.iter_mut().take(to).skip(from).for_each(|cell| *cell = letter(span.work));
        }
        // Writing to a string does not fail.
        let _ = writeln!(drawn, "stage {stage:>3} {}", row.iter().collect::<String>());
    }
    drawn
}

fn letter(work: Instruction) -> char {
    let micro = work.item().map_or(0, |item| item.micro);
    let of = |alphabet: &[u8]| char::from(alphabet[micro % alphabet.len()]);
    match work {
        Instruction::Forward(_) => of(b"0123456789"),
        Instruction::BackwardWeight(_) => 'w',
        _ => of(b"abcdefghij"),
    }
}

/// The same as an SVG image, with the number of every micro-batch.
pub fn svg(simulation: &Simulation, unit: f64, title: &str) -> String {
    let width = simulation.makespan() / unit * UNIT_PX;
    let height = simulation.spans.len() as f64 * ROW_PX + 24.0;
    let mut drawn = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n<text x=\"2\" y=\"14\">{title}</text>\n"
    );
    for (stage, spans) in simulation.spans.iter().enumerate() {
        let y = 22.0 + stage as f64 * ROW_PX;
        for span in spans {
            let (x, wide) = (span.start / unit * UNIT_PX, (span.end - span.start) / unit * UNIT_PX);
            let (item, colour) = match span.work {
                Instruction::Forward(item) => (item, "#9ecae1"),
                Instruction::BackwardWeight(item) => (item, "#a1d99b"),
                work => (work.item().unwrap_or(crate::schedule::Item { chunk: 0, micro: 0 }), "#fdae6b"),
            };
            let _ = writeln!(
                drawn,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{:.1}\" fill=\"{colour}\" stroke=\"#fff\"/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                ROW_PX - 4.0,
                x + 3.0,
                y + 15.0,
                item.micro
            );
        }
    }
    drawn.push_str("</svg>\n");
    drawn
}
