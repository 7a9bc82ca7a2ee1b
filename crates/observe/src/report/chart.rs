//! Two kinds of chart: lines, and layers that add up.

use std::fmt::Write;

use super::frame::Frame;
use super::series::{Curve, Merge, Point, shorten_rows};
use super::text::{Escaped, Unit};

/// How many colours the page has.
pub(super) const COLOURS: usize = 8;

/// A named curve.
pub(super) struct Line<'a> {
    pub(super) name: &'a str,
    pub(super) points: Vec<Point>,
    /// Whether every point gets a dot: for curves of few points.
    pub(super) dotted: bool,
}

/// What every chart has.
pub(super) struct Heading<'a> {
    pub(super) title: &'a str,
    /// What a reader must know to read it right; may be empty.
    pub(super) note: &'a str,
    pub(super) unit: Unit,
}

/// Lines over steps. `skipped` are steps to mark at the lower edge.
pub(super) fn lines(heading: &Heading<'_>, lines: &[Line<'_>], skipped: &[f64], from_zero: bool) -> String {
    let curves: Vec<Curve> = lines.iter().map(|line| Curve::new(&line.points)).collect();
    let x =
        lines.iter().flat_map(|line| line.points.iter().map(|point| point.0)).chain(skipped.iter().copied());
    let y = curves.iter().flat_map(|curve| curve.points().map(|point| point.1));
    let shown: Vec<&Line<'_>> = lines.iter().filter(|line| !line.points.is_empty()).collect();
    let names: Vec<&str> = shown.iter().map(|line| line.name).collect();
    let Some(frame) = Frame::around(x, y, from_zero, heading.unit) else {
        return figure(heading, &[], "<p class=\"none\">No number was recorded.</p>\n");
    };
    let mut body = String::new();
    for (colour, (line, curve)) in lines.iter().zip(&curves).enumerate() {
        for piece in &curve.pieces {
            draw_piece(&mut body, &frame, piece, colour);
            if line.dotted || piece.len() == 1 {
                draw_dots(&mut body, &frame, piece, colour, heading.unit);
            }
        }
        for &step in &curve.broken_at {
            let (x, y) = (frame.x(step), frame.top() + 4.0);
            let _ = writeln!(
                body,
                "<path class=\"broken\" d=\"M{:.1} {:.1}l6 6m0 -6l-6 6\"><title>step {step}: not a number</title></path>",
                x - 3.0,
                y - 3.0
            );
        }
    }
    draw_skipped(&mut body, &frame, skipped);
    let mut note = heading.note.to_owned();
    if curves.iter().any(|curve| !curve.broken_at.is_empty()) {
        note += " Crosses at the upper edge: values that are no numbers.";
    }
    if !skipped.is_empty() {
        note += " Marks at the lower edge: steps that were skipped.";
    }
    figure(&Heading { note: note.trim_start(), ..*heading }, &names, &frame.draw(heading.title, &body))
}

/// Layers over steps that add up; `rows` hold one value per name. `outline` is drawn over them.
pub(super) fn layers(
    heading: &Heading<'_>,
    names: &[&str],
    rows: &[(f64, Vec<f64>)],
    merge: Merge,
    outline: Option<Line<'_>>,
) -> String {
    let positions = rows.iter().map(|row| row.0);
    let rows = shorten_rows(rows, merge);
    let sums = rows.iter().map(|(_, values)| values.iter().sum());
    let outline = outline.map(|line| (line.name, Curve::new(&line.points)));
    let outline_y = outline.iter().flat_map(|(_, curve)| curve.points().map(|point| point.1));
    let Some(frame) = Frame::around(positions, sums.chain(outline_y), true, heading.unit) else {
        return figure(heading, &[], "<p class=\"none\">Nothing was recorded.</p>\n");
    };
    let mut body = String::new();
    let mut floor = vec![0.0; rows.len()];
    for layer in 0..names.len() {
        let ceiling: Vec<f64> = rows.iter().zip(&floor).map(|(row, below)| below + row.1[layer]).collect();
        draw_layer(&mut body, &frame, &rows, &floor, &ceiling, layer);
        floor = ceiling;
    }
    let mut legend = names.to_vec();
    if let Some((name, curve)) = &outline {
        for piece in &curve.pieces {
            draw_piece(&mut body, &frame, piece, COLOURS);
        }
        legend.resize(COLOURS, "");
        legend.push(name);
    }
    figure(heading, &legend, &frame.draw(heading.title, &body))
}

fn draw_piece(body: &mut String, frame: &Frame, piece: &[Point], colour: usize) {
    let mut path = String::new();
    for (index, &(x, y)) in piece.iter().enumerate() {
        let _ = write!(path, "{}{:.1} {:.1}", if index == 0 { 'M' } else { 'L' }, frame.x(x), frame.y(y));
    }
    let _ = writeln!(body, "<path class=\"line s{colour}\" d=\"{path}\"/>");
}

fn draw_dots(body: &mut String, frame: &Frame, piece: &[Point], colour: usize, unit: Unit) {
    for &(step, value) in piece {
        let _ = writeln!(
            body,
            "<circle class=\"dot s{colour}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>step {step}: {}</title></circle>",
            frame.x(step),
            frame.y(value),
            unit.show(value)
        );
    }
}

/// One mark per place where it can be told from the last.
fn draw_skipped(body: &mut String, frame: &Frame, skipped: &[f64]) {
    let mut last = f64::NEG_INFINITY;
    for &step in skipped {
        let x = frame.x(step);
        if x - last >= 1.0 {
            let (bottom, top) = (frame.bottom(), frame.bottom() - 8.0);
            let _ = writeln!(
                body,
                "<line class=\"skipped\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom:.1}\" y2=\"{top:.1}\">\
                 <title>step {step}: skipped</title></line>"
            );
            last = x;
        }
    }
}

/// A layer as stairs: each row reaches from halfway to the last one to halfway to the next.
fn draw_layer(
    body: &mut String,
    frame: &Frame,
    rows: &[(f64, Vec<f64>)],
    floor: &[f64],
    ceiling: &[f64],
    layer: usize,
) {
    let (left, right) = frame.x_range();
    let halfway = |index: usize| (rows[index].0 + rows[index + 1].0) / 2.0;
    let edges = |index: usize| {
        let start = if index == 0 { left } else { halfway(index - 1) };
        let end = if index + 1 == rows.len() { right } else { halfway(index) };
        (frame.x(start), frame.x(end))
    };
    let mut path = String::new();
    for index in 0..rows.len() {
        let ((start, end), y) = (edges(index), frame.y(ceiling[index]));
        let _ = write!(path, "{}{start:.1} {y:.1}L{end:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
    }
    for index in (0..rows.len()).rev() {
        let ((start, end), y) = (edges(index), frame.y(floor[index]));
        let _ = write!(path, "L{end:.1} {y:.1}L{start:.1} {y:.1}");
    }
    let _ = writeln!(body, "<path class=\"area s{layer}\" d=\"{path}Z\"/>");
}

fn figure(heading: &Heading<'_>, legend: &[&str], drawing: &str) -> String {
    let mut html =
        format!("<figure>\n<figcaption>{}</figcaption>\n<p class=\"legend\">", Escaped(heading.title));
    for (colour, name) in legend.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
        let _ = write!(html, "<span><i class=\"s{colour}\"></i>{}</span> ", Escaped(name));
    }
    let _ = write!(html, "</p>\n{drawing}");
    if !heading.note.is_empty() {
        let _ = writeln!(html, "<p class=\"note\">{}</p>", Escaped(heading.note));
    }
    html + "</figure>\n"
}
