//! The picture of a roofline: operations per second over operations per byte, both by powers of ten.

use std::fmt::Write;

use super::frame::{HEIGHT, WIDTH};
use super::text::{Escaped, Unit};
use crate::roofline::{Limit, Place, Roofline};

const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 26.0;
/// Modules that are drawn, and named.
const MOST_DOTS: usize = 24;
const MOST_NAMED: usize = 8;
/// Decades of an axis, at most.
const MOST_DECADES: i32 = 12;

/// Where powers of ten lie.
struct Axis {
    low: i32,
    high: i32,
}

impl Axis {
    fn around(values: impl Iterator<Item = f64>) -> Option<Axis> {
        let powers = values.filter(|value| value.is_finite() && *value > 0.0).map(f64::log10);
        let (low, high) = powers
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), power| (low.min(power), high.max(power)));
        if low > high {
            return None;
        }
        let high = high.ceil() as i32;
        Some(Axis { low: (low.floor() as i32).min(high - 1).max(high - MOST_DECADES), high })
    }

    /// How far along a value is.
    fn share(&self, value: f64) -> f64 {
        let power = value.max(f64::MIN_POSITIVE).log10();
        ((power - f64::from(self.low)) / f64::from(self.high - self.low)).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.low..=self.high).map(|power| 10f64.powi(power))
    }
}

/// The figure; empty where nothing was measured.
pub(super) fn figure(roofline: &Roofline) -> String {
    let (peak, mut places) = (&roofline.peak, roofline.by_time());
    places.retain(|place| place.flops > 0 && place.seconds > 0.0);
    places.truncate(MOST_DOTS);
    let speed = |place: &Place| place.flops as f64 / place.seconds;
    let x = Axis::around(places.iter().map(|place| place.intensity()).chain([peak.ridge()]));
    let y = Axis::around(places.iter().map(|place| speed(place)).chain([peak.flops_per_s]));
    let (Some(x), Some(y), false) = (x, y, places.is_empty()) else { return String::new() };
    let at_x = |value: f64| LEFT + x.share(value) * (WIDTH - LEFT - RIGHT);
    let at_y = |value: f64| HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM);

    let mut legend = String::new();
    let mut body = String::new();
    for tick in y.ticks() {
        let (y, right) = (at_y(tick), WIDTH - RIGHT);
        let label = Unit::Count.show(tick);
        // Writing to a string does not fail.
        let _ = writeln!(
            body,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 6.0,
            y + 4.0
        );
    }
    for tick in x.ticks() {
        let label = Unit::Plain.show(tick);
        let _ = writeln!(
            body,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            at_x(tick),
            HEIGHT - 8.0
        );
    }
    // The memory's slope begins where it enters the drawing.
    let lowest = 10f64.powi(x.low).max(10f64.powi(y.low) / peak.bytes_per_s);
    let _ = writeln!(
        body,
        "<path class=\"line s7\" d=\"M{:.1} {:.1}L{:.1} {:.1}L{:.1} {:.1}\"/>",
        at_x(lowest),
        at_y(lowest * peak.bytes_per_s),
        at_x(peak.ridge()),
        at_y(peak.flops_per_s),
        WIDTH - RIGHT,
        at_y(peak.flops_per_s)
    );
    let longest = places.iter().map(|place| place.seconds).fold(f64::MIN_POSITIVE, f64::max);
    for (index, place) in places.iter().enumerate() {
        let colour = index.min(MOST_NAMED);
        let name = if place.module.is_empty() { "(model)" } else { &place.module };
        let [of_flops, of_bytes] = place.shares(peak);
        let limit = match peak.limit(place) {
            Limit::Compute => format!("{:.0} % of the cores' peak", 100.0 * of_flops),
            Limit::Memory => format!("{:.0} % of the memory's peak", 100.0 * of_bytes),
        };
        let radius = 3.0 + 6.0 * (place.seconds / longest).sqrt();
        let _ = writeln!(
            body,
            "<circle class=\"dot s{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius:.1}\"><title>{}: {limit}</title></circle>",
            at_x(place.intensity()),
            at_y(speed(place)),
            Escaped(name)
        );
        if index < MOST_NAMED {
            let _ = write!(legend, "<span class=\"s{colour}\"><i></i>{}</span>", Escaped(name));
        }
    }
    format!(
        "<figure>\n<figcaption>What holds modules back</figcaption>\n<p class=\"legend\">{legend}</p>\n\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"operations per second over operations per byte\">\n\
         {body}</svg>\n<p class=\"note\">Operations per second over operations per byte of one profiled micro-batch; the line is \
         what this machine measured: memory binds left of its bend, the cores right of it. Larger dots took longer.</p>\n</figure>\n"
    )
}
