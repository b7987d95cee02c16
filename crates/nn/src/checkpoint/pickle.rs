//! Reads the pickle of a PyTorch file: names, tensors' descriptions and the dictionaries that hold them. Nothing in it runs.
//!
//! A pickle is a program for a stack machine that may call any Python function. This machine knows the few functions that
//! describe tensors, and computes what they would return; it refuses every other name ([`global`]) as soon as one is mentioned.
//! It has no recursion, lets objects contain themselves, and charges all that it holds to a limit.

mod objects;

use std::collections::HashMap;

use objects::{Global, Storage, global};
pub(super) use objects::{Tensor, Unpickled, Value, element_size};

/// Why a pickle is not read.
#[derive(Debug, PartialEq)]
pub(super) enum Fault {
    /// No program of PyTorch's writes this.
    Damaged(String),
    /// The pickle is sound, but asks for something that is not done here.
    Refused(String),
}

type Result<T> = std::result::Result<T, Fault>;

fn broken<T>(reason: impl Into<String>) -> Result<T> {
    Err(Fault::Damaged(reason.into()))
}

fn refused<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Fault::Refused(format!(
        "{what}, and only tensors are read, nothing runs: save them alone, with torch.save(model.state_dict(), file)"
    )))
}

/// PyTorch's own limit.
const MOST_DIMENSIONS: usize = 64;

/// Reads a pickle. It may hold `limit` bytes of values, by an estimate.
pub(super) fn unpickle(bytes: &[u8], limit: u64) -> Result<Unpickled<'_>> {
    Ok(unpickle_first(bytes, limit)?.0)
}

/// As [`unpickle`], of the pickle that bytes begin with. Returns its length, too.
pub(super) fn unpickle_first(bytes: &[u8], limit: u64) -> Result<(Unpickled<'_>, usize)> {
    let mut machine = Machine {
        rest: bytes,
        left: limit,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        dicts: Vec::new(),
        tensors: Vec::new(),
        tuples: Vec::new(),
        storages: Vec::new(),
    };
    let root = machine.run()?;
    let mut texts: Vec<(u32, &str)> =
        machine.memo.iter().filter_map(|(place, value)| Some((*place, value.text()?))).collect();
    texts.sort_unstable_by_key(|(place, _)| *place);
    let texts = texts.into_iter().map(|(_, text)| text).collect();
    let unpickled = Unpickled { root, dicts: machine.dicts, tensors: machine.tensors, texts };
    Ok((unpickled, bytes.len() - machine.rest.len()))
}

struct Machine<'a> {
    rest: &'a [u8],
    /// Bytes that may still be held.
    left: u64,
    stack: Vec<Value<'a>>,
    /// Heights of the stack. What lies below the last one cannot be popped.
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
    dicts: Vec<Vec<(&'a str, Value<'a>)>>,
    tensors: Vec<Tensor<'a>>,
    tuples: Vec<Vec<Value<'a>>>,
    storages: Vec<Storage<'a>>,
}

impl<'a> Machine<'a> {
    /// Runs to the end of the program, and returns what it leaves.
    fn run(&mut self) -> Result<Value<'a>> {
        loop {
            let opcode = self.byte()?;
            match opcode {
                b'.' => return self.pop(),
                0x80 => self.protocol()?,
                // FRAME: its length. Frames only help to read ahead.
                0x95 => drop(self.take(8)?),
                b'(' => self.mark()?,
                b'0' => self.pop_or_unmark()?,
                b'1' => drop(self.pop_to_mark()?),
                b'2' => {
                    let top = self.top()?;
                    self.push(top)?;
                }
                b'N' => self.push(Value::None)?,
                0x88 | 0x89 => self.push(Value::Bool)?,
                b'J' => {
                    let number = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(number.into()))?;
                }
                b'K' => {
                    let number = self.byte()?;
                    self.push(Value::Int(number.into()))?;
                }
                b'M' => {
                    let number = u16::from_le_bytes(self.array()?);
                    self.push(Value::Int(number.into()))?;
                }
                // LONG1, LONG4
                0x8a | 0x8b => {
                    let len = if opcode == 0x8a { self.byte()?.into() } else { self.len::<4>()? };
                    let number = long(self.take(len)?);
                    self.push(number)?;
                }
                // BINFLOAT
                b'G' => self.skip(8)?,
                // BINUNICODE, SHORT_BINUNICODE, BINUNICODE8
                b'X' => self.text::<4>()?,
                0x8c => self.text::<1>()?,
                0x8d => self.text::<8>()?,
                // Bytes, and strings of Python 2: BINSTRING, SHORT_BINSTRING, BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8
                b'T' | b'B' => self.bytes::<4>()?,
                b'U' | b'C' => self.bytes::<1>()?,
                0x8e | 0x96 => self.bytes::<8>()?,
                // Containers.
                b']' | 0x8f => self.push(Value::List)?,
                b'a' => {
                    self.pop()?;
                    self.check_list()?;
                }
                // APPENDS, ADDITEMS
                b'e' | 0x90 => {
                    self.pop_to_mark()?;
                    self.check_list()?;
                }
                // LIST, FROZENSET
                b'l' | 0x91 => {
                    self.pop_to_mark()?;
                    self.push(Value::List)?;
                }
                b')' => self.push_tuple(Vec::new())?,
                b't' => {
                    let items = self.pop_to_mark()?;
                    self.push_tuple(items)?;
                }
                // TUPLE1, TUPLE2, TUPLE3
                0x85..=0x87 => {
                    let mut items = vec![Value::None; usize::from(opcode - 0x84)];
                    for item in items.iter_mut().rev() {
                        *item = self.pop()?;
                    }
                    self.push_tuple(items)?;
                }
                b'}' => self.push_dict()?,
                b'd' => {
                    let items = self.pop_to_mark()?;
                    self.push_dict()?;
                    self.set_items(&items)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_items(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.set_items(&items)?;
                }
                // The memo: BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
                b'q' => {
                    let key = self.byte()?.into();
                    self.put(key)?;
                }
                b'r' => {
                    let key = u32::from_le_bytes(self.array()?);
                    self.put(key)?;
                }
                0x94 => {
                    let key = u32::try_from(self.memo.len()).unwrap_or(u32::MAX);
                    self.put(key)?;
                }
                b'h' => {
                    let key = self.byte()?.into();
                    self.get(key)?;
                }
                b'j' => {
                    let key = u32::from_le_bytes(self.array()?);
                    self.get(key)?;
                }
                // What names something, or calls it.
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.push_global(module, name)?;
                }
                0x93 => match (self.pop()?, self.pop()?) {
                    (Value::Text(name), Value::Text(module)) => self.push_global(module, name)?,
                    _ => return broken("its pickle names a function by something else than text"),
                },
                b'i' => {
                    let (module, name) = (self.line()?, self.line()?);
                    return refused(format_args!("its pickle makes an object of {module}.{name}"));
                }
                b'R' => {
                    let (arguments, function) = (self.pop()?, self.pop()?);
                    let result = self.call(function, arguments)?;
                    self.push(result)?;
                }
                b'b' => {
                    self.pop()?;
                    // A state dict's attribute `_metadata`. It describes versions, which names and shapes show.
                    if !matches!(self.top()?, Value::Dict(_)) {
                        return refused("its pickle sets the state of an object");
                    }
                }
                b'o' | 0x81 | 0x92 => return refused("its pickle makes an object of a class"),
                0x82..=0x84 => {
                    return refused("its pickle names something by a number of the program that wrote it");
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.push_storage(id)?;
                }
                _ => {
                    return broken(format!(
                        "its pickle has the instruction {opcode:#04x}, which torch.save does not write by default"
                    ));
                }
            }
        }
    }

    // ---- the program's bytes ----------------------------------------------------------------------------------------

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            return broken("its pickle is cut off");
        };
        self.rest = rest;
        Ok(taken)
    }

    fn array<const SIZE: usize>(&mut self) -> Result<[u8; SIZE]> {
        let taken = self.take(SIZE)?;
        Ok(*taken.first_chunk().expect("it has this length"))
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    /// A length of `SIZE` bytes; one that is too large for the machine is longer than the rest too.
    fn len<const SIZE: usize>(&mut self) -> Result<usize> {
        let mut bytes = [0; 8];
        bytes[..SIZE].copy_from_slice(&self.array::<SIZE>()?);
        Ok(usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Result<&'a str> {
        let Some(len) = self.rest.iter().position(|byte| *byte == b'\n') else {
            return broken("its pickle is cut off");
        };
        let line = self.take(len)?;
        self.take(1)?;
        utf8(line)
    }

    fn protocol(&mut self) -> Result<()> {
        match self.byte()? {
            0..=5 => Ok(()),
            more => broken(format!("its pickle is of protocol {more}, where at most 5 is known")),
        }
    }

    /// Pushes a value of which only the length matters.
    fn skip(&mut self, len: usize) -> Result<()> {
        self.take(len)?;
        self.push(Value::Other)
    }

    fn text<const SIZE: usize>(&mut self) -> Result<()> {
        let len = self.len::<SIZE>()?;
        let text = utf8(self.take(len)?)?;
        self.push(Value::Text(text))
    }

    fn bytes<const SIZE: usize>(&mut self) -> Result<()> {
        let len = self.len::<SIZE>()?;
        self.skip(len)
    }

    // ---- the stack --------------------------------------------------------------------------------------------------

    fn charge(&mut self, bytes: usize) -> Result<()> {
        match self.left.checked_sub(bytes as u64) {
            Some(left) => self.left = left,
            None => return broken("its pickle describes more than a file of this length can hold"),
        }
        Ok(())
    }

    fn push(&mut self, value: Value<'a>) -> Result<()> {
        self.charge(size_of_val(&value))?;
        self.stack.push(value);
        Ok(())
    }

    /// The height below which nothing may be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value<'a>> {
        match self.stack.pop() {
            Some(value) if self.stack.len() >= self.floor() => Ok(value),
            _ => broken("its pickle takes more values than it has"),
        }
    }

    fn top(&self) -> Result<Value<'a>> {
        match self.stack.last() {
            Some(value) if self.stack.len() > self.floor() => Ok(*value),
            _ => broken("its pickle takes more values than it has"),
        }
    }

    fn mark(&mut self) -> Result<()> {
        self.charge(size_of_val(&self.stack.len()))?;
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// `POP` removes the value on top, or a mark that lies there.
    fn pop_or_unmark(&mut self) -> Result<()> {
        match self.marks.pop_if(|mark| *mark == self.stack.len()) {
            Some(_) => Ok(()),
            None => self.pop().map(drop),
        }
    }

    /// Removes the last mark and returns what lies above it.
    fn pop_to_mark(&mut self) -> Result<Vec<Value<'a>>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => broken("its pickle takes more values than it has"),
        }
    }

    fn put(&mut self, key: u32) -> Result<()> {
        let value = self.top()?;
        self.charge(2 * size_of_val(&value))?;
        self.memo.insert(key, value);
        Ok(())
    }

    fn get(&mut self, key: u32) -> Result<()> {
        match self.memo.get(&key) {
            Some(&value) => self.push(value),
            None => broken("its pickle refers to a value that it has not made"),
        }
    }

    // ---- objects ----------------------------------------------------------------------------------------------------

    fn check_list(&self) -> Result<()> {
        match self.top()? {
            Value::List => Ok(()),
            _ => refused("its pickle calls the method append of something else than a list"),
        }
    }

    fn push_tuple(&mut self, items: Vec<Value<'a>>) -> Result<()> {
        self.charge(size_of_val(&items) + size_of_val(items.as_slice()))?;
        self.tuples.push(items);
        self.push(Value::Tuple(self.tuples.len() - 1))
    }

    fn push_dict(&mut self) -> Result<()> {
        self.charge(size_of_val(&self.dicts))?;
        self.dicts.push(Vec::new());
        self.push(Value::Dict(self.dicts.len() - 1))
    }

    /// Sets keys and values, which alternate, in the dictionary on top.
    fn set_items(&mut self, items: &[Value<'a>]) -> Result<()> {
        let dict = match self.top()? {
            Value::Dict(dict) => dict,
            _ => return refused("its pickle sets an item of something else than a dictionary"),
        };
        let (pairs, odd) = items.as_chunks::<2>();
        if !odd.is_empty() {
            return broken("its pickle has a key without a value");
        }
        for &[key, value] in pairs {
            if let Value::Text(key) = key {
                let entry = (key, value);
                self.charge(size_of_val(&entry))?;
                self.dicts[dict].push(entry);
            }
        }
        Ok(())
    }

    fn push_global(&mut self, module: &'a str, name: &'a str) -> Result<()> {
        match global(module, name) {
            Some(global) => self.push(Value::Global(global)),
            None => refused(format_args!("its pickle names {module}.{name}")),
        }
    }

    /// The tensor storage of a persistent id: ("storage", type, key, device, length). Before version 1.6 there was one more, which is None
    /// for storages that are no part of another one.
    fn push_storage(&mut self, id: Value<'a>) -> Result<()> {
        let storage = match self.items(id) {
            Some(
                &[
                    Value::Text("storage"),
                    Value::Global(Global::Storage(dtype)),
                    Value::Text(key),
                    _,
                    Value::Int(len),
                    ref rest @ ..,
                ],
            ) if matches!(rest, [] | [Value::None]) => {
                usize::try_from(len).ok().map(|len| Storage { key, dtype, len })
            }
            _ => None,
        };
        let Some(storage) = storage else {
            return broken("its pickle refers to something else than a storage");
        };
        self.charge(size_of_val(&storage))?;
        self.storages.push(storage);
        self.push(Value::Storage(self.storages.len() - 1))
    }

    fn items(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match value {
            Value::Tuple(tuple) => Some(&self.tuples[tuple]),
            _ => None,
        }
    }

    /// What the named function would return.
    fn call(&mut self, function: Value<'a>, arguments: Value<'a>) -> Result<Value<'a>> {
        let Value::Global(function) = function else { return refused("its pickle calls an object") };
        let Some(arguments) = self.items(arguments) else {
            return broken("its pickle calls a function without a tuple of arguments");
        };
        let tensor = match (function, arguments) {
            (Global::Dict, []) => {
                self.push_dict()?;
                return self.pop();
            }
            // A `Counter` with its numbers.
            (Global::Dict, [Value::Dict(_)]) | (Global::Device, _) => return Ok(Value::Other),
            (Global::Set, _) => return Ok(Value::List),
            (Global::Size, &[sizes @ Value::Tuple(_)]) => return Ok(sizes),
            (Global::RebuildParameter, &[tensor @ Value::Tensor(_), ..]) => return Ok(tensor),
            (Global::RebuildTensor, arguments) => self.tensor(arguments)?,
            // A tensor with attributes: (function, type, arguments, attributes).
            (
                Global::RebuildFromType,
                &[
                    Value::Global(Global::RebuildTensor),
                    Value::Global(Global::TensorType),
                    Value::Tuple(arguments),
                    _,
                ],
            ) => self.tensor(&self.tuples[arguments])?,
            _ => return refused("its pickle calls a function in a way that torch.save does not"),
        };
        self.charge(size_of_val(&tensor) + 2 * size_of_val(tensor.shape.as_slice()))?;
        self.tensors.push(tensor);
        Ok(Value::Tensor(self.tensors.len() - 1))
    }

    /// A tensor of (storage, offset, sizes, strides, requires_grad, hooks, metadata), of which the last may be absent.
    fn tensor(&self, arguments: &[Value<'a>]) -> Result<Tensor<'a>> {
        let (&[Value::Storage(storage), Value::Int(offset), sizes, strides, ..], 6 | 7) =
            (arguments, arguments.len())
        else {
            return broken("its pickle describes a tensor in an unknown way");
        };
        match arguments.get(6) {
            None | Some(Value::None) => {}
            Some(&Value::Dict(metadata)) if self.dicts[metadata].is_empty() => {}
            Some(_) => {
                return refused("its pickle has a tensor that is the negative or the conjugate of another");
            }
        }
        let (storage, shape, mut strides) =
            (self.storages[storage], self.numbers(sizes)?, self.numbers(strides)?);
        let Ok(offset) = usize::try_from(offset) else {
            return broken("a tensor in it begins before its storage");
        };
        if shape.len() != strides.len() {
            return broken("a tensor in it has other dimensions than strides");
        }
        for (stride, size) in strides.iter_mut().zip(&shape) {
            if *size <= 1 {
                *stride = 0;
            }
        }
        if !shape.contains(&0) {
            // A size is not 0 here, so the product is that of the last element's index.
            let last = shape
                .iter()
                .zip(&strides)
                .try_fold(offset, |last, (size, stride)| last.checked_add((size - 1).checked_mul(*stride)?));
            if last.is_none_or(|last| last >= storage.len) {
                return broken("a tensor in it is larger than its storage");
            }
        }
        Ok(Tensor { storage, offset, shape, strides })
    }

    fn numbers(&self, tuple: Value<'a>) -> Result<Vec<usize>> {
        let number = |value: &Value<'a>| match value {
            Value::Int(number) => usize::try_from(*number).ok(),
            _ => None,
        };
        let items = self.items(tuple).filter(|items| items.len() <= MOST_DIMENSIONS);
        match items.and_then(|items| items.iter().map(number).collect()) {
            Some(numbers) => Ok(numbers),
            None => broken("a tensor in it has no shape"),
        }
    }
}

fn utf8(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).or_else(|_| broken("its pickle has text that is not UTF-8"))
}

/// A whole number of any length, little-endian in two's complement.
fn long<'a>(bytes: &[u8]) -> Value<'a> {
    if bytes.len() > 8 {
        return Value::Other;
    }
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut number = [if negative { 0xff } else { 0 }; 8];
    number[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(number))
}
