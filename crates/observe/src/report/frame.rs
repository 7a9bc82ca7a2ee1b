//! The frame of a chart: where a value lies on the drawing, the grid, the axis labels.

use std::fmt::Write;

use super::text::{Escaped, Unit};

pub(super) const WIDTH: f64 = 480.0;
pub(super) const HEIGHT: f64 = 240.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 26.0;
/// Larger magnitudes are drawn here: differences of two of them still are numbers.
const LARGEST: f64 = 1e300;

/// From values to places.
pub(super) struct Frame {
    x: (f64, f64),
    y: (f64, f64),
    y_ticks: Vec<f64>,
    unit: Unit,
    /// Of positions.
    x_unit: Unit,
}

impl Frame {
    /// A frame that holds all of `x` and `y`. `None` when there is nothing to hold.
    pub(super) fn around(
        x: impl Iterator<Item = f64>,
        y: impl Iterator<Item = f64>,
        from_zero: bool,
        unit: Unit,
    ) -> Option<Frame> {
        let (x_low, x_high) = range(x)?;
        let (mut low, mut high) = range(y)?;
        if from_zero {
            low = low.min(0.0);
            high = high.max(0.0);
        }
        // Labels have four digits: a curve that is flatter than a hundredth of its height is given that much room.
        let magnitude = low.abs().max(high.abs());
        let least = if magnitude == 0.0 { 1.0 } else { (magnitude * 0.01).max(f64::MIN_POSITIVE) };
        let missing = (least - (high - low)).max(0.0);
        high += if from_zero { missing } else { missing / 2.0 };
        low -= if from_zero { 0.0 } else { missing / 2.0 };
        let scale = unit.tick_scale(magnitude);
        let step = tick_step((high - low) / scale) * scale;
        let first = (low / step).floor();
        let count = ((high / step).ceil() - first).clamp(1.0, 12.0);
        let y_ticks: Vec<f64> = (0..=count as u32).map(|tick| (first + f64::from(tick)) * step).collect();
        let y = (first * step, (first + count) * step);
        // Half a step to each side of a single one, or more where a float cannot tell half steps apart.
        let room = if x_low == x_high { (x_low * 1e-9).max(0.5) } else { 0.0 };
        let x = (x_low - room, x_high + room);
        Some(Frame { x, y, y_ticks, unit, x_unit: Unit::Count })
    }

    /// The same, where positions are amounts of memory.
    pub(super) fn with_bytes_below(self) -> Frame {
        Frame { x_unit: Unit::Bytes, ..self }
    }

    pub(super) fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        let share = (value.clamp(-LARGEST, LARGEST) - self.y.0) / (self.y.1 - self.y.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    /// The lowest and the highest position.
    pub(super) fn x_range(&self) -> (f64, f64) {
        self.x
    }

    /// The place of the upper edge.
    pub(super) fn top(&self) -> f64 {
        TOP
    }

    /// The place of the lower edge.
    pub(super) fn bottom(&self) -> f64 {
        HEIGHT - BOTTOM
    }

    /// A drawing with this frame around `body`, described for those who cannot see it.
    pub(super) fn draw(&self, description: &str, body: &str) -> String {
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            Escaped(description)
        );
        let right = WIDTH - RIGHT;
        for &tick in &self.y_ticks {
            let y = self.y(tick);
            let label = self.unit.show(tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 6.0,
                y + 4.0
            );
        }
        for (value, anchor) in self.x_labels() {
            let label = self.x_unit.show(value);
            let _ = writeln!(
                svg,
                "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{label}</text>",
                self.x(value),
                HEIGHT - 8.0
            );
        }
        svg.push_str(body);
        svg.push_str("</svg>\n");
        svg
    }

    /// Whole steps to label: the ends, and round ones between where they fit.
    fn x_labels(&self) -> Vec<(f64, &'static str)> {
        let (low, high) = self.x;
        if high - low <= 1.0 {
            let whole = [low, high].into_iter().filter(|value| value.fract() == 0.0).collect::<Vec<_>>();
            return match whole[..] {
                [low, high] => vec![(low, "start"), (high, "end")],
                _ => vec![((low + high) / 2.0, "middle")],
            };
        }
        let step = tick_step(high - low).max(1.0);
        let room = (high - low) * 0.1;
        let mut labels = vec![(low, "start"), (high, "end")];
        let mut value = (low / step).ceil() * step;
        for _ in 0..12 {
            if value >= high - room {
                break;
            }
            if value > low + room {
                labels.push((value, "middle"));
            }
            value += step;
        }
        labels
    }
}

fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|value| value.is_finite()).map(|value| value.clamp(-LARGEST, LARGEST));
    finite.fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((value.min(low), value.max(high))),
    })
}

/// A round distance (1, 2 or 5 times a power of ten) that cuts `span` into about five.
fn tick_step(span: f64) -> f64 {
    let rough = span / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= rough * 0.99);
    step.filter(|step| step.is_finite() && *step > 0.0).unwrap_or(span)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(y: &[f64], from_zero: bool) -> Frame {
        Frame::around([1.0, 9.0].into_iter(), y.iter().copied(), from_zero, Unit::Plain).unwrap()
    }

    #[test]
    fn ticks_are_round_and_hold_the_values() {
        assert_eq!(frame(&[2.3, 5.5], false).y_ticks, [2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(frame(&[3.0, 87.0], true).y, (0.0, 100.0));
    }

    #[test]
    fn every_place_is_a_number_inside_the_drawing() {
        let hard = [
            vec![0.0],
            vec![5e-324],
            vec![0.0, 5e-324],
            vec![f64::MAX, f64::MIN],
            vec![-3.0, -3.0],
            vec![1e16, 1e16 + 2.0],
            vec![f64::NAN, 1.0],
        ];
        for (y, from_zero) in hard.iter().flat_map(|y| [(y, true), (y, false)]) {
            let frame = frame(y, from_zero);
            for &value in y.iter().filter(|value| value.is_finite()) {
                let place = frame.y(value);
                assert!((0.0..=HEIGHT).contains(&place), "{y:?}: {value} at {place}");
            }
            assert!(!frame.draw("", "").contains("NaN"), "{y:?}");
        }
        assert!(Frame::around([].into_iter(), [].into_iter(), true, Unit::Plain).is_none());
    }
}
