//! The few fields of TensorBoard's `Event` message that scalars need, in protocol-buffer wire format.
//!
//! `Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }`,
//! `Summary { repeated Value value = 1; }`, `Value { string tag = 1; float simple_value = 2; }`.
//! A reader passes over any other field.

use crate::monitor::wire::{BYTES, VARINT, put_bytes, put_number, put_varint};

/// One event of an event file.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The first event of every file.
    FileVersion(String),
    /// One point of a curve.
    Scalar {
        /// The name of the curve.
        tag: String,
        /// The value, in the precision of the format.
        value: f32,
        /// The position.
        step: u64,
    },
}

const FIXED64: u64 = 1;
const FIXED32: u64 = 5;

impl Event {
    /// The message.
    pub(super) fn encode(&self, wall_time_s: f64) -> Vec<u8> {
        let mut message = Vec::new();
        put_varint(&mut message, 1 << 3 | FIXED64);
        message.extend_from_slice(&wall_time_s.to_le_bytes());
        match self {
            Event::FileVersion(version) => put_bytes(&mut message, 3, version.as_bytes()),
            Event::Scalar { tag, value, step } => {
                put_number(&mut message, 2, *step);
                let mut point = Vec::new();
                put_bytes(&mut point, 1, tag.as_bytes());
                put_varint(&mut point, 2 << 3 | FIXED32);
                point.extend_from_slice(&value.to_le_bytes());
                let mut summary = Vec::new();
                put_bytes(&mut summary, 1, &point);
                put_bytes(&mut message, 5, &summary);
            }
        }
        message
    }

    /// The events of a message: one, or one per value of its summary.
    pub(super) fn decode(message: &[u8]) -> Result<Vec<Event>, &'static str> {
        let (mut step, mut events) = (0, Vec::new());
        let mut points = Vec::new();
        for field in fields(message)? {
            match field {
                (2, Value::Varint(value)) => step = value,
                (3, Value::Bytes(version)) => events.push(Event::FileVersion(text(version)?)),
                (5, Value::Bytes(summary)) => points.extend(fields(summary)?),
                _ => {}
            }
        }
        for point in points {
            let (1, Value::Bytes(point)) = point else { continue };
            let (mut tag, mut value) = (String::new(), None);
            for field in fields(point)? {
                match field {
                    (1, Value::Bytes(bytes)) => tag = text(bytes)?,
                    (2, Value::Fixed32(bits)) => value = Some(f32::from_bits(bits)),
                    _ => {}
                }
            }
            events.extend(value.map(|value| Event::Scalar { tag, value, step }));
        }
        Ok(events)
    }
}

enum Value<'a> {
    Varint(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32(u32),
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64, &'static str> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or("a number is cut off")?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err("a number is longer than 64 bits")
}

fn take<'a>(bytes: &mut &'a [u8], count: u64) -> Result<&'a [u8], &'static str> {
    let count = usize::try_from(count).map_err(|_| "a field is longer than memory")?;
    let (taken, rest) = bytes.split_at_checked(count).ok_or("a field is cut off")?;
    *bytes = rest;
    Ok(taken)
}

fn fields(mut bytes: &[u8]) -> Result<Vec<(u64, Value<'_>)>, &'static str> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = take_varint(&mut bytes)?;
        let value = match key & 7 {
            VARINT => Value::Varint(take_varint(&mut bytes)?),
            FIXED64 => take(&mut bytes, 8).map(|_| Value::Fixed64)?,
            BYTES => {
                let length = take_varint(&mut bytes)?;
                Value::Bytes(take(&mut bytes, length)?)
            }
            FIXED32 => {
                let (bits, rest) = bytes.split_first_chunk::<4>().ok_or("a field is cut off")?;
                bytes = rest;
                Value::Fixed32(u32::from_le_bytes(*bits))
            }
            _ => return Err("a field has an unknown wire type"),
        };
        found.push((key >> 3, value));
    }
    Ok(found)
}

fn text(bytes: &[u8]) -> Result<String, &'static str> {
    String::from_utf8(bytes.to_vec()).map_err(|_| "a string is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_has_exactly_the_bytes_of_the_message() {
        let event = Event::Scalar { tag: "a".into(), value: 1.0, step: 300 };
        let expected = [
            &[0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f][..],         // wall_time = 1.0
            &[0x10, 0xac, 0x02],                               // step = 300
            &[0x2a, 0x0a, 0x0a, 0x08],                         // summary, value
            &[0x0a, 0x01, b'a', 0x15, 0x00, 0x00, 0x80, 0x3f], // tag, simple_value = 1.0
        ];
        assert_eq!(event.encode(1.0), expected.concat());
    }

    #[test]
    fn messages_read_back_and_cut_ones_never_panic() {
        let events = [
            Event::FileVersion("brain.Event:2".into()),
            Event::Scalar { tag: "größe/x".into(), value: f32::INFINITY, step: u64::MAX },
        ];
        for event in events {
            let message = event.encode(1.5);
            assert_eq!(Event::decode(&message), Ok(vec![event.clone()]));
            for length in 0..message.len() {
                // Cut between two fields it is a shorter message; anywhere else it is an error.
                assert_ne!(Event::decode(&message[..length]), Ok(vec![event.clone()]));
            }
        }
        assert!(Event::decode(&[0xff; 11]).is_err());
    }
}
