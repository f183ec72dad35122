def by_class(request, state):
    length = 200 if request.class_name == "chat" else 1000
    return length - request.output_tokens
