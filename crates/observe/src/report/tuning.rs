//! The page of an autotuning: what was tried, as a picture and a table.

use std::fmt::Write;

use super::frame::Frame;
use super::head;
use super::text::{Escaped, Unit};

/// One configuration that was tried.
#[derive(Debug, Clone, PartialEq)]
pub struct TriedPoint {
    /// Its name.
    pub name: String,
    /// What rank 0 held at most, where it ran.
    pub memory_bytes: Option<f64>,
    /// What was measured, where anything was.
    pub value: Option<f64>,
    /// That or why not, in words.
    pub said: String,
}

/// What a page is made from.
#[derive(Debug, Clone, Copy)]
pub struct Tuning<'a> {
    /// Its heading.
    pub title: &'a str,
    /// What was measured.
    pub metric: &'a str,
    /// In the order of runs.
    pub tried: &'a [TriedPoint],
    /// The name of the best.
    pub best: Option<&'a str>,
    /// Its configuration.
    pub best_config: &'a str,
}

/// The page.
pub fn render_tuning(tuning: &Tuning<'_>) -> String {
    let mut page = head(tuning.title);
    page.push_str(&picture(tuning));
    page.push_str("<h2>What was tried</h2>\n<table>\n<tbody>\n");
    for point in tuning.tried {
        let is_best = tuning.best == Some(point.name.as_str());
        let memory = point.memory_bytes.map_or_else(String::new, |bytes| Unit::Bytes.show(bytes));
        // Writing to a string does not fail.
        let _ = writeln!(
            page,
            "<tr><th scope=\"row\">{}{}</th><td>{}</td><td>{memory}</td></tr>",
            Escaped(&point.name),
            if is_best { " (best)" } else { "" },
            Escaped(&point.said)
        );
    }
    page.push_str("</tbody>\n</table>\n");
    if tuning.best.is_some() {
        let config = Escaped(tuning.best_config);
        let _ = writeln!(
            page,
            "<details open=\"open\"><summary>ds_config_optimal.json</summary><pre>{config}</pre></details>"
        );
    }
    page + "</body>\n</html>\n"
}

/// What was measured over memory; empty where nothing was.
fn picture(tuning: &Tuning<'_>) -> String {
    let measured =
        || tuning.tried.iter().filter_map(|point| Some((point, point.memory_bytes?, point.value?)));
    let memory = measured().map(|(_, bytes, _)| bytes);
    let values = measured().map(|(_, _, value)| value);
    let Some(frame) = Frame::around(memory, values, true, Unit::Count) else { return String::new() };
    let mut body = String::new();
    for (point, bytes, value) in measured() {
        let is_best = tuning.best == Some(point.name.as_str());
        let (x, y) = (frame.x(bytes), frame.y(value));
        let (colour, radius) = if is_best { (1, 6) } else { (0, 4) };
        let said = format!("{}: {}, {}", point.name, point.said, Unit::Bytes.show(bytes));
        let _ = writeln!(
            body,
            "<circle class=\"dot s{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"><title>{}</title></circle>",
            Escaped(&said)
        );
        if is_best {
            // Beside the dot, on the side that has room.
            let (at, anchor) = if x > 240.0 { (x - 10.0, "end") } else { (x + 10.0, "start") };
            let _ = writeln!(
                body,
                "<text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                y + 4.0,
                Escaped(&point.name)
            );
        }
    }
    let failed = tuning.tried.len() - measured().count();
    let rest =
        if failed == 0 { String::new() } else { format!(" {failed} did not run: the table says why.") };
    format!(
        "<section class=\"charts\">\n<figure>\n<figcaption>{} over memory</figcaption>\n\
         <p class=\"legend\"><span class=\"s1\"><i></i>best</span><span class=\"s0\"><i></i>tried</span></p>\n{}\
         <p class=\"note\">Bytes that rank 0 held at most, to the right.{rest}</p>\n</figure>\n</section>\n",
        Escaped(tuning.metric),
        frame.with_bytes_below().draw("what was measured of each configuration, over its memory", &body)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(name: &str, measured: Option<(f64, f64)>) -> TriedPoint {
        TriedPoint {
            name: name.into(),
            memory_bytes: measured.map(|(bytes, _)| bytes),
            value: measured.map(|(_, value)| value),
            said: measured.map_or("out of memory".into(), |(_, value)| format!("throughput {value}")),
        }
    }

    #[test]
    fn the_winner_is_marked_and_what_failed_says_why() {
        let mib = f64::from(1 << 20);
        let tried = [
            point("z0", Some((100.0 * mib, 10.0))),
            point("z1<script>", Some((50.0 * mib, 12.0))),
            point("z3", None),
        ];
        let best_config = "{\"zero_optimization\": {\"stage\": 1}}";
        let page = render_tuning(&Tuning {
            title: "mine",
            metric: "throughput",
            tried: &tried,
            best: Some("z1<script>"),
            best_config,
        });
        assert_eq!(page.matches("<circle").count(), 2);
        assert_eq!(page.matches("class=\"dot s1\"").count(), 1);
        for what in [
            "z1&lt;script&gt; (best)",
            "out of memory",
            "1 did not run",
            "50 MiB",
            "100 MiB",
            "&quot;stage&quot;: 1",
        ] {
            assert!(page.contains(what), "{what}: {page}");
        }
        assert!(!page.contains("<script") && !page.contains("NaN"), "{page}");
        let nothing = render_tuning(&Tuning {
            title: "mine",
            metric: "m",
            tried: &tried[2..],
            best: None,
            best_config: "",
        });
        assert!(!nothing.contains("<svg") && nothing.contains("out of memory"), "{nothing}");
    }
}
