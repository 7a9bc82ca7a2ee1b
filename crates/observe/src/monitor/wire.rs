//! Writing of protocol buffers: the little that event files and run files need.

/// A number in as many bytes as it takes.
pub(super) const VARINT: u64 = 0;
/// Bytes with their length before them.
pub(super) const BYTES: u64 = 2;

pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A whole number as a field.
pub(super) fn put_number(out: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(out, field << 3 | VARINT);
    put_varint(out, value);
}

/// A text, or a message in a message.
pub(super) fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(out, field << 3 | BYTES);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}
